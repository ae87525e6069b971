"""Parameters of tensor subclasses are gathered by their own hooks, as under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from dbuffer import CollectiveCall, observe_collectives
from megatron_fsdp import AdamW, MixedPrecisionPolicy, fully_shard
from tests.functional.megatron_fsdp.variants.wire_tensor import (
    FullFormTensor,
    NoHookTensor,
    RankSizedTensor,
    ReleasingTensor,
    WireTensor,
)
from tests.harness import on_ranks


def make_model(kind: type[torch.Tensor], rows: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, rows), nn.ReLU(), nn.Linear(rows, 6), nn.ReLU(), nn.Linear(6, 1))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()), requires_grad=True)
    return model


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, columns: int = 8) -> list[float]:
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, columns)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_ranks(2)
def test_losses_are_those_of_fsdp2_with_its_optimizer_and_with_ours() -> None:
    found = []
    for shard, kind in ((torch_fully_shard, torch.optim.AdamW), (fully_shard, torch.optim.AdamW), (fully_shard, AdamW)):
        model = make_model(WireTensor)
        shard(model[0])
        shard(model)
        found.append(losses_of(model, kind(model.parameters(), lr=0.01)))
    assert found[0] == found[1] == found[2]


@on_ranks(3)
def test_the_form_of_five_arguments_gets_shape_stride_module_and_policy() -> None:
    model = make_model(FullFormTensor)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float32))
    calls: list[CollectiveCall] = []
    with observe_collectives(calls.append):
        model(torch.randn(3, 8)).sum().backward()
    assert FullFormTensor.seen == ((6, 12), (12, 1), "Linear", torch.float32)
    # The bytes of bf16 rows and of an int64 from each of 3 ranks, both padded to 16 bytes, of two parameters.
    hooked = 3 * (4 * 8 * 2 + 16) + 3 * (2 * 12 * 2 + 16)
    # One collective gathers the whole model, with the root's biases and the last layer.
    (gathered,) = [call.num_bytes for call in calls if call.kind == "all_gather"]
    plain = 4 * (12 + 6 + 6 + 1)
    assert hooked + plain <= gathered <= hooked + plain + 3 * 16 * 4


@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
@on_ranks(4)
def test_a_class_that_releases_gathered_tensors_trains_without_their_memory(
    reshard_after_forward: bool | int,
) -> None:
    found, held = [], set()
    for kind in (WireTensor, ReleasingTensor):
        model = make_model(kind)
        model[2] = nn.Linear(12, 6)  # four ranks have other rows
        for module in (model[0], model):
            fully_shard(module, reshard_after_forward=reshard_after_forward)
        if kind is ReleasingTensor:
            model[0].register_forward_pre_hook(lambda *_: held.add(ReleasingTensor.held()))
        found.append(losses_of(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    assert found[0] == found[1]
    assert held == {(False, True)}


@pytest.mark.parametrize(("rows", "columns"), [(12, 7), (6, 3), (2, 1)])
@on_ranks(2)
def test_ranks_hold_as_many_rows_whatever_their_size(rows: int, columns: int) -> None:
    losses: list[list[float]] = []
    for shard in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(columns, rows), nn.ReLU(), nn.Linear(rows, 1))
        model[0].weight = nn.Parameter(WireTensor(model[0].weight.detach()))
        shard(model)
        losses.append(losses_of(model, torch.optim.AdamW(model.parameters(), lr=0.01), columns))
    shape, (wanted, found) = tuple(model[0].weight._local_tensor.shape), losses
    assert shape == (rows // 2, columns)
    assert found == wanted


@on_ranks(2)
def test_unsharded_wrapped_tensors_have_no_memory_after_reshard_unless_kept() -> None:
    model = make_model(ReleasingTensor)
    model[2].weight = nn.Parameter(torch.zeros(6, 12))
    fully_shard(model)
    seen = []
    for keep in (False, True):
        model.set_keep_unsharded_storage(keep)
        model.unshard()
        model.reshard()
        seen.append(ReleasingTensor.held())
    assert seen == [(False, False), (False, True)]


class Undecided(ReleasingTensor):
    answer = "yes"


class Aliasing(ReleasingTensor):
    keeps_values = True


INT8_MOMENTS = MixedPrecisionPolicy(main_params_dtype=torch.float32, moments="int8")


class Reading(WireTensor):
    def fsdp_pre_all_gather(self, mesh: Any, *args: Any) -> Any:
        return args[-2]._get_fsdp_state()


@pytest.mark.parametrize(
    ("kind", "shape", "policy", "words"),
    [
        (NoHookTensor, (12, 4), None, r"'0.weight' is a NoHookTensor, .*without fsdp_pre_all_gather.*ignored_params"),
        (RankSizedTensor, (12, 4), None, r"0.weight.*RankSizedTensor.* returns"),
        (Undecided, (12, 4), None, r"0.weight.*Undecided.*fsdp_should_release.*'yes'.*True or False"),
        (Aliasing, (12, 4), None, r"0.weight.*Aliasing.*fsdp_should_release.*shares memory.*fix: return False"),
        (Reading, (12, 4), None, r"0.weight.*Reading.*_get_fsdp_state.*FSDP2's private state.*shard the plain weight"),
        (WireTensor, (7, 4), None, r"'0.weight'.*\(7, 4\).*2 ranks cannot share evenly.*ignored_params"),
        (WireTensor, (12, 64), INT8_MOMENTS, r"'0.weight' of shape .*: 384 elements, no multiple of 256, as Mixed"),
    ],
)
@on_ranks(2)
def test_hooks_that_return_ungatherable_tensors_are_refused_on_every_rank(
    kind: Any, shape: tuple[int, int], policy: MixedPrecisionPolicy | None, words: str
) -> None:
    model = nn.Sequential(nn.Linear(shape[1], shape[0]))
    model[0].weight = nn.Parameter(kind(model[0].weight.detach()))
    with pytest.raises(ValueError, match=f"(?s){words}"):
        fully_shard(model, mp_policy=policy)
