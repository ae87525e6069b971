"""Weights in the forms that inference engines and reinforcement-learning frameworks ask a trainer for."""
