"""Check the order of the engine's streams: on CPU ranks with CUDA's semantics, or from the trace of a GPU."""
