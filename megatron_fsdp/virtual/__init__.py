"""A device of numbers: training code runs as it is, computes nothing, and tells how long a real machine would take.

``python -m benchmarks virtual --models llama3-8b --meshes 8 --tokens 2048 --causes 8`` prints the predicted time of
forward and backward, the share of it in which compute waits, and what for, for this engine and for FSDP2.
"""
