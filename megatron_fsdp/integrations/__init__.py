"""Other trainers over this engine."""
