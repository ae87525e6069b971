"""What a step did: timelines, the watch over ranks, checksums, the scale of gradients."""
