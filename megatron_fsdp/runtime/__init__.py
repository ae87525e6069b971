"""What runs in a training step; docs/architecture.md tells in which order to read it."""
