"""Tools that the tests share: a pool of worker processes that runs a function as the ranks of a process group."""

from tests.harness.failures import FailureKind, RankError, RankFailure
from tests.harness.rank_tests import on_ranks
from tests.harness.ranks import run_ranks

__all__ = ["FailureKind", "RankError", "RankFailure", "on_ranks", "run_ranks"]
