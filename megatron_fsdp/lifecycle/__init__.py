"""Make and convert parameter groups and units; methods that users call between steps."""
