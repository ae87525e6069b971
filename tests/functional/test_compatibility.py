"""Code written for ``torch.distributed.fsdp`` gives the same losses and weights after changing the import."""

import pytest

from tests.functional import (
    compatibility_arguments,
    compatibility_communication,
    compatibility_methods,
    compatibility_tools,
)
from tests.functional.compatibility import SCENARIOS, available, disagreements, has_name, run_both
from tests.functional.compatibility_differences import DIFFERENCES, see_both
from tests.harness import on_ranks, run_ranks

__all__ = ["compatibility_arguments", "compatibility_communication", "compatibility_methods", "compatibility_tools"]


# PyTorch goes through all layouts of operands for each of its operators: seconds where a mesh has three axes. Of what
# has a twin on one axis, the one on two.
NIGHTLY = (
    "set_requires_gradient_sync on HSDP", "set_requires_all_reduce(recurse=False)", "set_is_last_backward on HSDP",
    "fully_shard(dp_mesh_dims=shard)", "fully_shard(dp_mesh_dims=two to shard)",
    "fully_shard(dp_mesh_dims=shard and replicate)", "norm layers that are units, in bf16 and fp16",
)  # fmt: skip


# PyTorch's own loader asks for the default device by a name that PyTorch itself deprecates.
@pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY else ()) for name in available()]
)
@on_ranks(lambda name: SCENARIOS[name].num_ranks)
def test_both_engines_agree(name: str) -> None:
    theirs, ours = run_both(name)
    assert disagreements(name, theirs, ours) == []


def see(name: str) -> tuple[object, object]:
    """Return what each engine does in a scenario of ``compatibility_differences``."""
    return see_both(name)


def is_as_written(found: object, wanted: object) -> bool:
    return found == wanted or (isinstance(found, str) and isinstance(wanted, str) and found.startswith(wanted))


@pytest.mark.parametrize("name", [name for name, each in DIFFERENCES.items() if has_name(each.needs)])
def test_engines_do_as_documented(name: str) -> None:
    wanted = DIFFERENCES[name]
    for theirs, ours in run_ranks(wanted.num_ranks, see, name):
        assert is_as_written(theirs, wanted.theirs), theirs
        assert is_as_written(ours, wanted.ours), ours
        assert is_as_written(ours, wanted.theirs) == is_as_written(wanted.ours, wanted.theirs)
