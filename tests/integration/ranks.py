"""``run_ranks`` with time for each rank to import the packages under test, which takes longer than most tests."""

import functools

from tests.harness import run_ranks as run_ranks_in_time

run_ranks = functools.partial(run_ranks_in_time, timeout=300.0)
