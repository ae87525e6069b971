"""Alternative ways for a parameter group to gather weights and reduce gradients."""
