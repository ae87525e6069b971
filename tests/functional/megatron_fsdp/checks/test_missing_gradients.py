"""A parameter that no rank used has no gradient, as in a plain model; one that some ranks used has the mean."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import AgreementError, FsdpModule, Placements, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.models import WIDTH
from tests.harness.twins import Twins

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
NUM_BRANCHES = 3


class Branches(nn.Module):
    """Two sets of linear branches with layers around them; each call names the branches that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BRANCHES))
        self.second = Branched()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, used: Sequence[int], second: Sequence[int] | None = None) -> torch.Tensor:
        x = self.entry(x)
        for number in used:
            x = x + torch.tanh(self.first[number](x))
        return self.head(self.second(x, used if second is None else second))


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BRANCHES))

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        x = x * 2
        for number in used:
            x = x + torch.tanh(self.branches[number](x))
        return x


def make(strategy: str, num_meshes: int = 1) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    oracle = Branches()
    model = copy.deepcopy(oracle)
    num_ranks = dist.get_world_size()
    is_wide = strategy in ("hsdp", "hfsdp")
    shape, names = ((num_ranks // 2, 2), ("outer", "inner")) if is_wide else ((num_ranks,), ("all",))
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=names) for _ in range(num_meshes)]
    placements = getattr(Placements, strategy)(*range(len(shape)))
    fully_shard(model.second, meshes[0], placements)
    sharded = fully_shard(model, meshes[-1], placements)
    assert isinstance(sharded, FsdpModule)
    return oracle, sharded


def data(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


# The branches used, by step and rank.
Uses = Sequence[Sequence[Sequence[int]]]
ALL = (0, 1, 2)
SCRIPTS: dict[str, Uses] = {
    "all by all, then one by none": ([ALL, ALL], [(0, 1), (0, 1)], [ALL, ALL], [(0,), (0,)]),
    "only one rank misses some": ([ALL, (0,)], [ALL, (1,)], [(1, 2), (2,)]),
}


def traffic(script: str) -> list[tuple[int, int]]:
    """Return for each step the number of a rank's requests to the store, and of its collectives of a maximum."""
    _, model = make("optim_grads_params")
    store: Any = dist.distributed_c10d._get_default_store()
    counts: Counter[str] = Counter()

    def observe(call: CollectiveCall) -> None:
        counts["collectives"] += call.kind == "all_reduce"

    result = []
    for number, (uses, add) in enumerate(zip(SCRIPTS[script], [store.add] * len(SCRIPTS[script]), strict=True)):
        counts.clear()
        rank = dist.get_rank()

        def counted(*arguments: Any, add: Callable[..., Any] = add) -> Any:
            counts["requests"] += "missing" in arguments[0]
            return add(*arguments)

        with observe_collectives(observe), mock.patch.object(type(store), "add", lambda _, *words: counted(*words)):
            model(data(rank, number), uses[rank % len(uses)]).square().mean().backward()
        result.append((counts["requests"], counts["collectives"]))
        model.zero_grad()
    return result


def test_ranks_communicate_only_if_every_rank_misses_gradients() -> None:
    # In the first case, the first rank reports and reads the others' reports; the second step asks again, and the third
    # stops.
    assert run_ranks(2, traffic, "all by all, then one by none") == [[(0, 0), (2, 1), (0, 1), (2, 1)]] * 2
    assert run_ranks(2, traffic, "only one rank misses some") == [
        [(0, 0), (0, 0), (2, 1)],
        [(2, 0), (2, 0), (2, 1)],
    ]


@on_ranks(4)
def test_ranks_that_miss_gradients_of_different_units_first_ask_over_one_mesh() -> None:
    # Two meshes of the same ranks have different communicators.
    _, model = make("hsdp", num_meshes=2)
    is_even = dist.get_rank() % 2 == 0
    model(data(dist.get_rank(), 0), ALL if is_even else (0,), (0,) if is_even else ALL).square().mean().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@on_ranks(2)
def test_reports_of_a_failed_backward_do_not_affect_later_steps() -> None:
    unused = [f"{where}.{number}.{name}" for where in ("first", "second.branches") for number in (0, 1)
              for name in ("weight", "bias")]  # fmt: skip
    _, model = make("optim_grads_params")
    rank = dist.get_rank()

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("stop")

    x = data(rank, 0).requires_grad_()
    x.register_hook(fail)
    # The error is raised at the end of backward, after the gradients of the inner unit were reduced.
    with pytest.raises(RuntimeError, match="stop"):
        model(x, (0,)).square().mean().backward()
    model.zero_grad()
    model(data(rank, 1), ALL if rank else (0,)).square().mean().backward()
    first = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    model.zero_grad()
    model(data(rank, 2), (2,)).square().mean().backward()
    assert first + [name for name, parameter in model.named_parameters() if parameter.grad is None] == unused


@on_ranks(2)
def test_a_rank_that_ends_before_the_vote_is_reported_with_the_unit() -> None:
    _, model = make("optim_grads_params")
    ended = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1")
    with (
        mock.patch("megatron_fsdp.checks.missing_gradients.all_reduce", side_effect=ended),
        pytest.raises(AgreementError, match=r"unit '.*': the vote on its missing gradients .* rank ended.* fix:"),
    ):
        model(data(dist.get_rank(), 0), (0,)).square().mean().backward()


@on_ranks(2)
def test_the_store_does_not_fill_up() -> None:
    # The store keeps keys of the last accumulation and of the first use.
    _, model = make("optim_grads_params")
    store: Any = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    rank = dist.get_rank()
    for number in range(20):
        model(data(rank, number), (0, 1) if rank else ALL).square().mean().backward()
        model.zero_grad()
    dist.barrier()
    after = store.num_keys()
    dist.barrier()
    assert int(after - before) < 15


class Skipped(nn.Linear):
    def forward(self, x: torch.Tensor, is_used: bool = True) -> torch.Tensor:
        return x + torch.tanh(super().forward(x)) if is_used else x * 1.0


class Skipping(nn.Module):
    """Layers of which a rank computes only the first ``uses``; the other layers return their input.

    Every second one has an additional layer, whose output is not used.

    Args:
        reentrant: of each pair of layers, whether it is checkpointed reentrantly, or not; None for not at all.
    """

    def __init__(self, *reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Skipped(WIDTH, WIDTH) for _ in range(6))
        self.beside = nn.ModuleList(Skipped(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def pair(self, x: torch.Tensor, uses: int, first: int) -> torch.Tensor:
        x = self.layers[first](x, first < uses)
        self.beside[first // 2](x.detach(), first < uses)
        return self.layers[first + 1](x, first + 1 < uses)

    def forward(self, x: torch.Tensor, uses: int) -> torch.Tensor:
        for first, is_reentrant in zip(range(0, 6, 2), self.reentrant, strict=True):
            if is_reentrant is None:
                x = self.pair(x, uses, first)
            else:
                x = checkpoint(self.pair, x, uses, first, use_reentrant=is_reentrant)
        return x


NONE = (None, None, None)


@pytest.mark.parametrize(
    ("uses", "reentrant"),
    [(3, NONE), (1, NONE), (3, (True, True, True)), (0, (True, True, True)), (3, (True, True, None))],
)
@on_ranks(2)
def test_a_rank_that_uses_none_of_the_last_layers_reduces_them_when_the_others_do(
    uses: int, reentrant: Sequence[bool | None]
) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(data(rank, step).requires_grad_(), 6 if rank else uses).square().mean()

    twins = Twins(lambda: Skipping(*reentrant))
    twins.backward(0, loss)
    assert twins.gradients_apart() < 1e-6
