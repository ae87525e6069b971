"""How a unit is made, once: which parameters it owns, and which of them share a flat buffer."""
