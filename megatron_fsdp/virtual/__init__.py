"""A virtual device: training code runs unchanged, computes nothing, and gives the time that a real machine would need.

``python -m benchmarks virtual --models llama3-8b --meshes 8 --tokens 2048 --causes 8`` prints, for this engine and for
FSDP2, the predicted time of forward and backward, the share of the time that compute waits, and the causes of the
waits.
"""
