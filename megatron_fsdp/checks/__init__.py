"""What is refused by name, and what ranks compare with each other."""
