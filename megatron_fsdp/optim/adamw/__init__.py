"""AdamW over flat buffers. Muon steps what is no matrix with it."""
