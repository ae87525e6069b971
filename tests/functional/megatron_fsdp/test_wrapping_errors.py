"""``fully_shard`` succeeds on all ranks or raises on all ranks; after an error modules are unchanged."""

import datetime
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dbuffer import Element, MeshError
from megatron_fsdp import AgreementError, CPUOffloadPolicy, Placements, fully_shard
from megatron_fsdp.checks import rendezvous
from megatron_fsdp.variants.memory_slots import reshard_to
from tests.harness import on_ranks, run_ranks
from tests.harness.models import Block, Stack, squared


class Mine(Exception):
    """Raised by a user's function on one rank."""


def interrupt(_: nn.Parameter) -> None:
    raise KeyboardInterrupt


def raise_mine(_: nn.Parameter) -> None:
    raise Mine("on this rank")


def with_scalar() -> nn.Module:
    block = Block()
    block.scale = nn.Parameter(torch.tensor(1.0))
    return block


# The call of rank 1 where other ranks shard a block, and the error that these get.
ON_ONE_RANK: dict[str, tuple[Callable[[], Any], str]] = {
    "a parameter that cannot be sharded": (
        lambda: fully_shard(with_scalar()),
        r"ConfigError: Block: parameter 'scale' has no dimensions",
    ),
    "an exception of the user's": (lambda: fully_shard(Block(), granularity=raise_mine), r"Mine: on this rank"),
    "an interrupt": (lambda: fully_shard(Block(), granularity=interrupt), r"KeyboardInterrupt"),
    "a bad argument": (lambda: fully_shard(Block(), reshard_after_forward=3), r"ConfigError: reshard_after_forward=3"),
    "no module": (lambda: fully_shard([]), r"ConfigError: fully_shard got an empty list"),
    "a mesh of another shape": (
        lambda: fully_shard(Block(), init_device_mesh("cpu", (2, 1, 1))),
        r"ConfigError: the mesh has 3 axes",
    ),
}


def shard_while_rank_one_raises(name: str) -> tuple[str, float, float]:
    """Return this rank's error, the time until it was raised, and the loss of a model that is sharded afterwards."""
    attempt = ON_ONE_RANK[name][0] if dist.get_rank() == 1 else lambda: fully_shard(Block())
    # All ranks make the meshes of all ranks.
    if name == "a mesh of another shape" and dist.get_rank() != 1:
        init_device_mesh("cpu", (2, 1, 1))
    start = time.monotonic()
    try:
        attempt()
    except (Exception, KeyboardInterrupt) as error:
        found, seconds = f"{type(error).__name__}: {error}", time.monotonic() - start
    else:
        return "no error", 0.0, 0.0
    model = Stack(Block(), Block())
    fully_shard(model.layers[0])
    fully_shard(model)
    loss = squared(model, dist.get_rank(), 0)
    loss.backward()
    return found, seconds, loss.item()


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_an_error_on_one_rank_is_raised_on_all_at_once_and_all_can_go_on(name: str) -> None:
    (told, seconds, loss), (raised, _, other_loss) = run_ranks(2, shard_while_rank_one_raises, name)
    wanted = ON_ONE_RANK[name][1]
    assert re.match(wanted, raised)
    assert told.count("fix: ") == 1, "that of the error, or the name of the rank with the traceback"
    assert re.match(r"AgreementError: rank 0 calls fully_shard on unit 'Block', but rank 1, which .*", told)
    assert re.search(wanted, told)
    assert seconds < 20
    assert loss > 0 < other_loss


def one_block_more(wraps_root: bool) -> None:
    model = Stack(*(Block() for _ in range(2 + dist.get_rank())))
    for layer in model.layers:
        fully_shard(layer)
    if wraps_root:
        fully_shard(model)
    squared(model, dist.get_rank(), 0).backward()


def another_setting() -> None:
    model = Stack(Block(), Block())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if dist.get_rank() == 1:
        reshard_to(fully_shard.state(model.layers[1]), False)  # type: ignore[attr-defined]  # FSDP2 has it
    squared(model, dist.get_rank(), 0).backward()


def other_order_of_models() -> None:
    models = [Stack(Block()), nn.Sequential(Block())]
    for model in models:
        fully_shard(model, placements=Placements.optim_grads(0))
    for model in models if dist.get_rank() else reversed(models):
        squared(model, dist.get_rank(), 0).backward()


DIFFERENT: list[tuple[Callable[[], object], str]] = [
    (
        lambda: one_block_more(True),
        r"the ranks of a mesh do different things: rank 0 calls fully_shard on unit 'Stack'; rank 1 calls fully_shard "
        r"on unit 'Block'",
    ),
    (
        lambda: one_block_more(False),
        r"do different things: rank 0 runs the model 'Block'; rank 1 calls fully_shard on unit 'Block'",
    ),
    (
        another_setting,
        r"model 'Stack': the ranks of a mesh have .*rank 0 has unit 'layers.1' .*reshard_after_forward None.*"
        r"rank 1 has unit 'layers.1' .*reshard_after_forward False",
    ),
    (other_order_of_models, r"do different things: rank 0 runs the model 'Sequential'; rank 1 runs the model 'Stack'"),
    (
        lambda: fully_shard(Block(), reshard_after_forward=bool(dist.get_rank())),
        r"unit 'Block': .* rank 0 has reshard_after_forward=False; rank 1 has reshard_after_forward=True",
    ),
]


@on_ranks(2)
def test_ranks_in_different_branches_raise_at_once_with_each_ranks_action() -> None:
    for act, words in DIFFERENT:
        start = time.monotonic()
        with pytest.raises(MeshError, match=words):
            act()
        assert time.monotonic() - start < 20


@contextmanager
def patient_for(seconds: float) -> Iterator[None]:
    with mock.patch.object(rendezvous, "job_timeout", return_value=datetime.timedelta(seconds=seconds)):
        yield


@on_ranks(2)
def test_a_late_rank_is_named_on_the_others_and_gets_an_error_itself() -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 1:
        store.wait(["given up"])
    with patient_for(3), pytest.raises(AgreementError) as refused:
        fully_shard(Block())
    store.set("given up", "")
    wanted = f"rank {rank} calls fully_shard on unit 'Block', but rank 1 did not come within 3 s of rank 0. Every rank"
    assert str(refused.value).startswith(wanted)
    assert ". fix: look at rank 1 for " in str(refused.value)


def meet_over_records_of_an_attempt_before() -> list[str]:
    """Meet after an earlier attempt, which left in torchrun's store a rendezvous that one rank never reached."""
    monkeypatch = pytest.MonkeyPatch()
    names = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        names.append(rendezvous.meet((0, 1), "comes"))
        if attempt == 0 and dist.get_rank() == 0:
            rendezvous.report_failure((0, 1), "comes", Mine("on this rank"))
        dist.barrier()
    monkeypatch.undo()
    return names


def test_records_of_an_earlier_attempt_in_the_store_are_ignored() -> None:
    first, second = run_ranks(2, meet_over_records_of_an_attempt_before)
    assert first == second
    assert len(set(first)) == 2


class Recurrent(nn.Module):
    """A module of every kind that wrapping changes: a linear layer, a recurrent one, a buffer, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 7)
        self.memory = nn.GRU(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.memory(self.up(x))[0]))


def cut_late(parameter: nn.Parameter) -> Element:
    if parameter.ndim == 1:
        raise Mine("after other groups were built")
    return Element()


REFUSED: dict[str, dict[str, Any]] = {
    "an int that does not divide the ranks": {"reshard_after_forward": 5},
    "not an int": {"reshard_after_forward": "always"},
    "a granularity that raises": {"granularity": cut_late},
    "offload of what rests whole": {"offload_policy": CPUOffloadPolicy(), "placements": Placements.optim(0)},
    "not a policy": {"mp_policy": 3},
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_a_refused_module_is_unchanged_and_can_be_sharded_afterwards(name: str) -> None:
    torch.manual_seed(3)
    model = Recurrent()
    before = {id(module): (type(module), dict(vars(module))) for module in model.modules()}
    tensors = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises((ValueError, TypeError, Mine)):
        fully_shard(model, **REFUSED[name])
    for module in model.modules():
        kind, attributes = before[id(module)]
        assert type(module) is kind
        assert [key for key, value in vars(module).items() if not _is_same(value, attributes.get(key))] == []
    after = model.state_dict(keep_vars=True)
    assert all(after[key] is tensor and tensor.equal(value) for key, (tensor, value) in tensors.items())
    output = model(torch.ones(2, 7))
    fully_shard(model)
    model.norm.reset_running_stats()
    assert torch.allclose(model(torch.ones(2, 7)), output)


def _is_same(value: Any, before: Any) -> bool:
    """Compare a module's attribute with its old value; compare dictionaries and lists by their contents."""
    if isinstance(value, (dict, list)):
        entries = value.values() if isinstance(value, dict) else value
        others = before.values() if isinstance(before, dict) else before
        return len(value) == len(before) and all(one is other for one, other in zip(entries, others, strict=True))
    return value is before or bool(value == before)
