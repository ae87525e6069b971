"""Everything that an ordinary training step is. Read root.py and backward.py first (docs/architecture.md)."""
