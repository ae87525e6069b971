"""AdamW over flat buffers. Muon uses it for parameters that are not matrices."""
