"""Everything that an ordinary training step does (docs/architecture.md).

Read in order of time: forward.py, backward.py, post_backward.py, final_callback.py. ``unit.py`` has their state.
``recovery.py`` is for a backward that raised, ``finalize_backward.py`` for manual finalization.

The way of a gradient: params.py (autograd's hook), grads.py, reduce.py, accumulation.py. The way of a weight:
param_group.py, weight_buffers.py, freshness.py. The order of work on a device: streams.py.
"""
