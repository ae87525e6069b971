"""Build a unit: the parameters it owns, and their groups, each in one flat buffer."""
