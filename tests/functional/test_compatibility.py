"""Code written for ``torch.distributed.fsdp`` gives the same losses and weights after changing the import."""

import pytest

from tests.functional import compatibility_arguments, compatibility_communication, compatibility_methods
from tests.functional.compatibility import SCENARIOS, Outcome, available, disagreements, run_both
from tests.harness import run_ranks

__all__ = ["compatibility_arguments", "compatibility_communication", "compatibility_methods"]


def run(name: str) -> tuple[Outcome, Outcome]:
    """Run a scenario of one of the modules above with both engines."""
    return run_both(name)


@pytest.mark.parametrize("name", available())
def test_both_engines_agree(name: str) -> None:
    for theirs, ours in run_ranks(SCENARIOS[name].num_ranks, run, name):
        assert disagreements(name, theirs, ours) == []
