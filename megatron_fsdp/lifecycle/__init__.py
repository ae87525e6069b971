"""How groups and units are made and converted, and what is called between steps."""
