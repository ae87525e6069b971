"""What users do that a plain model allows, and what is refused by name."""
