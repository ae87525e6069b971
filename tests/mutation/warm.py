"""Starts the ranks of a trial, in the copy of the tree that it tries."""

from tests.harness import run_ranks

NUM_RANKS = 4


def start_ranks() -> None:
    """Start as many ranks as most tests need; a mutant that makes this fail is found by the first test on ranks."""
    run_ranks(NUM_RANKS, nothing)


def nothing() -> None:
    """Do nothing on a rank."""
