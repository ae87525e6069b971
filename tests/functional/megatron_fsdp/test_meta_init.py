"""Models sharded on the meta device: initialised in place, equally on any number of ranks, or loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from dbuffer import memory_meter
from megatron_fsdp import (
    ConfigError,
    MixedPrecisionPolicy,
    StateError,
    fsdp_no_shard,
    fully_shard,
    fully_shard_optimizer,
    materialize,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Block, Made
from tests.harness.oracle import differing, sharded, units_of, whole

STRATEGIES = {
    (1,): ("optim_grads_params",),
    (2,): ("no_shard", "optim_grads", "optim_grads_params"),
    (3,): ("optim_grads_params",),
    (2, 2): ("hsdp", "hfsdp"),
}


class Tagged(nn.Module):
    """Embedding, blocks and a head tied to the embedding, and a buffer.

    Initialisers are normal, uniform and constant, or make tensors of their own, as those of Mamba's decay do.
    """

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7, padding_idx=3)
        self.blocks = nn.ModuleList([Block(), Block(hidden=5)])
        self.scale, self.decay = nn.Parameter(torch.empty(7)), nn.Parameter(torch.empty(7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.empty(7))
        self.reset_own()

    def reset_own(self) -> None:
        nn.init.trunc_normal_(self.scale, std=0.5)
        with torch.no_grad():
            self.table.copy_(torch.arange(7.0))
            self.decay.copy_(torch.log(torch.arange(1.0, 8.0))).add_(torch.rand(7))

    reset_parameters = reset_own

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale * self.decay + self.table.to(x.dtype))


def blocks_of(model: Tagged) -> nn.ModuleList:
    return model.blocks


def sharded_on_meta(mesh_shape: tuple[int, ...], strategy: str, policy: MixedPrecisionPolicy | None = None) -> Tagged:
    with torch.device("meta"):
        model = Tagged()
    return sharded(model, strategy, units=blocks_of, mesh=mesh_shape, mp_policy=policy)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value, value) for name, value in model.state_dict().items()}


def materialized(mesh_shape: tuple[int, ...], strategy: str) -> dict[str, torch.Tensor]:
    model = sharded_on_meta(mesh_shape, strategy)
    torch.manual_seed(100 + dist.get_rank())  # only the first rank's value counts
    materialize(model)
    return values_of(model)


def on_one_process() -> dict[str, torch.Tensor]:
    model = Tagged()
    torch.manual_seed(100)
    reset(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def reset(module: nn.Module) -> None:
    """Call ``reset_parameters`` where a module has it, children first."""
    for child in module.children():
        reset(child)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("mesh_shape", STRATEGIES, ids=str)
def test_materialized_values_equal_one_processs_on_any_number_of_ranks(mesh_shape: tuple[int, ...]) -> None:
    wanted = on_one_process()
    for strategy in STRATEGIES[mesh_shape]:
        for found in run_ranks(torch.Size(mesh_shape).numel(), materialized, mesh_shape, strategy):
            assert differing(found, wanted) == [], strategy


@pytest.mark.parametrize("num_ranks", nightly_but([1, 3], [1, 2, 3]))
@on_ranks(lambda num_ranks: num_ranks)
def test_to_empty_and_reset_parameters_give_the_values_of_one_process(num_ranks: int) -> None:
    wanted = on_one_process()
    model = sharded_on_meta((dist.get_world_size(),), "optim_grads_params")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(100)
    with implicit_replication():
        reset(model)
    assert differing(values_of(model), wanted) == []


@on_ranks(2)
def test_a_materialized_model_trains_like_one_built_with_values() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    on_meta = sharded_on_meta((2,), "optim_grads_params", policy)
    materialize(on_meta)
    values, model = values_of(on_meta), Tagged()
    model.load_state_dict(values)
    sharded(model, units=blocks_of, mp_policy=policy)
    losses: list[list[float]] = [[], []]
    for each, seen in zip((on_meta, model), losses, strict=True):
        optimizer = fully_shard_optimizer(torch.optim.AdamW(each.parameters(), lr=0.01))
        for step in range(3):
            tokens = (torch.arange(6) * (dist.get_rank() + 2) + step) % 11
            loss = nn.functional.cross_entropy(each(tokens).float(), tokens.roll(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_materializing_never_holds_more_than_the_shards_and_one_unit() -> None:
    model = sharded_on_meta((2,), "optim_grads_params")
    before = memory_meter().current_bytes
    memory_meter().reset_peak()
    materialize(model)
    groups = [group for unit in units_of(model) for group in unit.parameter_groups]
    shards = sum(group.main_weight.nbytes + (group.main_grad.nbytes if group.main_grad else 0) for group in groups)
    largest = max(group.gathered.nbytes + group.gathered.nbytes for group in groups)
    peak = memory_meter().peak_bytes - before
    assert shards <= peak <= shards + largest


@on_ranks(2)
def test_modules_without_initialisers_are_refused_before_memory_is_allocated() -> None:
    with torch.device("meta"):
        bare: Any = Made(lambda m, x: x @ m.weight, weight=nn.Parameter(torch.empty(5, 3)))
        used = nn.Linear(3, 3)
    fully_shard(bare)
    fully_shard(used)
    with pytest.raises(ConfigError, match=r"(?s)^module '' \(FSDPMade\) holds \['weight'\].*init_fn"):
        materialize(bare)
    with pytest.raises(StateError, match=r"(?s)^unit 'Linear'.*materialize\(model\)"):
        used(torch.ones(1, 3))
    with pytest.raises(StateError, match=r"^Linear holds no sharded module"):
        materialize(nn.Linear(2, 2))
    assert all(parameter.is_meta for parameter in bare.parameters())

    def fill(module: Any) -> None:
        nn.init.constant_(module.weight, 2.0)

    materialize(bare, fill)
    assert torch.equal(whole(bare.weight, bare.weight), torch.full((5, 3), 2.0))


# PyTorch's own loader asks for the default device by a name that PyTorch itself deprecates.
@pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`:UserWarning")
@pytest.mark.parametrize("way", ["plain tensors, assign", "canonical DTensors, assign", "broadcast from rank 0", "DCP"])
@on_ranks(3)
def test_a_model_on_the_meta_device_takes_values_from(way: str, tmp_path: Path) -> None:
    path = str(tmp_path)
    torch.manual_seed(5)
    source = Tagged()
    wanted = {name: value.detach().clone() for name, value in source.state_dict().items()}
    model = sharded_on_meta((dist.get_world_size(),), "optim_grads_params")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "plain tensors, assign":
        model.load_state_dict(wanted, assign=True)
    elif way == "canonical DTensors, assign":
        placed = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in wanted.items() if name != "table"}
        model.load_state_dict({**placed, "table": wanted["table"]}, assign=True)
    elif way == "broadcast from rank 0":
        full = dict(wanted) if dist.get_rank() == 0 else {}
        set_model_state_dict(
            model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        )
        model._buffers["table"] = wanted["table"]
    else:
        # This stands for a launcher: each rank of this run writes the same whole values once.
        save(wanted, checkpoint_id=path)
        model.to_empty(device="cpu")
        state = get_model_state_dict(model)
        load(state, checkpoint_id=path)
        set_model_state_dict(model, state)
    groups = [group for unit in units_of(model) for group in unit.parameter_groups]
    assert all(not group.spec.is_meta for group in groups)
    assert differing(values_of(model), wanted) == []
    tokens = torch.arange(6) % 11
    assert torch.allclose(model(tokens), source(tokens), atol=1e-6)


@on_ranks(2)
def test_replicated_parameters_stay_so_through_meta_initialisation() -> None:
    wanted = on_one_process()
    with torch.device("meta"):
        model: Any = Tagged()
    fsdp_no_shard(model.scale)
    fsdp_no_shard(model.blocks[1])
    sharded(model, units=blocks_of)
    torch.manual_seed(100)
    materialize(model)
    assert all(each.to_local().shape == each.shape for each in (model.scale, *model.blocks[1].parameters()))
    assert differing(values_of(model), wanted) == []
