"""Muon for matrices, each computed whole by one rank, and AdamW for the other parameters."""
