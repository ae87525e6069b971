"""Benchmarks will live here; there are none yet (README, "What is there")."""
