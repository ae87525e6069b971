"""Code written for ``torch.distributed.fsdp`` gives the same losses and weights after changing the import."""

from typing import Any

import pytest

from tests.functional.compatibility import agreements, differences
from tests.functional.compatibility.program import PROGRAMS, complaints, has_name
from tests.harness import run_ranks

__all__ = ["agreements", "differences"]
# PyTorch's own loader asks for the default device by a name that PyTorch itself deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning"),
    # nn.TransformerEncoder makes nested tensors in evaluation.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
# PyTorch tries all layouts of operands for each of its operators, which takes seconds on a mesh of three axes. Among
# programs for one and for two axes, the latter are nightly.
NIGHTLY = (
    "set_requires_gradient_sync on HSDP", "set_requires_all_reduce(recurse=False)", "set_is_last_backward on HSDP",
    "fully_shard(dp_mesh_dims=shard)", "fully_shard(dp_mesh_dims=two to shard)",
    "fully_shard(dp_mesh_dims=shard and replicate)", "norm layers that are units, in bf16 and fp16",
)  # fmt: skip


def programs(*, that_differ: bool) -> list[object]:
    """Return the programs that the installed PyTorch has the names for."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY else ())
        for name, each in PROGRAMS.items()
        if has_name(each.needs) and (each.differs is not None) is that_differ
    ]


def all_complaints(names: list[str]) -> dict[str, list[str]]:
    return {name: complaints(name) for name in names}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[list[str]]]:
    """Run the selected programs on the same ranks, because PyTorch caches its analysis of operators."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items]
    result: dict[str, list[list[str]]] = {name: [] for name in names}
    for num_ranks in (1, 2, 4):
        chosen = [name for name in names if PROGRAMS[name].num_ranks == num_ranks]
        for rank in run_ranks(num_ranks, all_complaints, chosen, timeout=600):
            for name, lines in rank.items():
                result[name].append(lines)
    return result


@pytest.mark.parametrize("name", programs(that_differ=False))
def test_both_engines_agree(name: str, found: dict[str, list[list[str]]]) -> None:
    assert found[name] == [[]] * PROGRAMS[name].num_ranks


@pytest.mark.parametrize("name", programs(that_differ=True))
def test_engines_do_as_documented(name: str, found: dict[str, list[list[str]]]) -> None:
    assert found[name] == [[]] * PROGRAMS[name].num_ranks
