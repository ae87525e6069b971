"""What runs in an undisturbed step, and little else."""
