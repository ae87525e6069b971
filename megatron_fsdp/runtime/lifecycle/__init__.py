"""How groups and units are made, converted and materialized, and what is called between steps."""
