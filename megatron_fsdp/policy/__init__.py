"""The user's choices for a unit: strategy, precision, offload and mesh, as checked plain data."""
