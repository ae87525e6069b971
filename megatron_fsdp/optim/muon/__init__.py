"""Muon: whole matrices on their owners, AdamW for the other parameters."""
