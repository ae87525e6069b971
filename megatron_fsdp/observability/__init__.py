"""Observers of training steps: timelines, a watch over ranks, checksums, and a check of the gradients' scale."""
