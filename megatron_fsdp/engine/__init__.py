"""Everything that an ordinary training step does (docs/architecture.md).

Read in order of time: root.py (forward), backward.py, post_backward.py, final_callback.py. ``unit.py`` has their state.
"""
