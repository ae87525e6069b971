"""The report of a live model, and its printed page."""

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fsdp import FsdpModule, MixedPrecisionPolicy, Placements, StateError, explain, fsdp_no_shard, fully_shard
from megatron_fsdp.formatting import format_bytes
from megatron_fsdp.lifecycle.module import unit_of
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.variants.memory_slots import use_slots
from tests.unit.megatron_fsdp.planning.chains import THREE, Chain, sharded, world

NUM_RANKS = 6


class Block(nn.Module):
    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(3, hidden)
        self.down = nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(x))
        return result


class Model(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(3, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=NUM_RANKS)
    yield init_device_mesh("cpu", (NUM_RANKS,))
    dist.destroy_process_group()


def test_a_model_without_units_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(StateError, match="Model holds no sharded module"):
        explain(Model())


def test_units_are_named_by_their_path_and_list_their_modules(mesh: DeviceMesh) -> None:
    model = Model(1)
    fully_shard(model.blocks[0], mesh)
    fully_shard([model.embedding, model.head], mesh)
    fully_shard(model, mesh)
    named = {unit.name: unit.modules for unit in explain(model).units}
    assert named == {"Model": ("Model",), "embedding": ("Embedding", "Linear"), "blocks.0": ("Block",)}


def test_the_report_gives_the_reason_for_kept_weights(mesh: DeviceMesh) -> None:
    model = Model(3)
    fully_shard(model.blocks[0], mesh)
    fully_shard(model.blocks[1], mesh, reshard_after_forward=False)
    fully_shard(model.blocks[2], mesh, Placements.optim(0))
    model.around = nn.Sequential(fully_shard(Block(), mesh, reshard_after_forward=2))
    fully_shard(model.around, mesh)
    fully_shard(model, mesh)
    units = explain(model).units
    assert {unit.name: unit.reason for unit in units} == {
        "Model": "kept after forward: it is the root",
        "blocks.0": "released after forward unless its backward is next: the default below the root",
        "blocks.1": "kept after forward: reshard_after_forward=False",
        "blocks.2": "nothing to release: its weights rest whole on every rank",
        "around": "nothing to release: it has no parameters of its own",
        "around.0": "released after forward but for one part in 2: reshard_after_forward=2",
    }


@pytest.mark.parametrize("source", ["communicator", "NCCL"])
def test_slots_of_a_communicator_are_explained_as_slots_of_the_device(mesh: DeviceMesh, source: str) -> None:
    model = fully_shard(Block(), mesh)
    unit = unit_of(model)
    use_slots({unit: SlotChoice("by_size")})
    wanted = explain(model)
    # A CPU communicator allocates no memory: the choice is only recorded.
    unit.slots = SlotChoice("by_size", source)
    assert explain(model) == wanted


def test_frozen_parameters_form_a_group_without_gradient_buffers(mesh: DeviceMesh) -> None:
    model = Block()
    model.up.requires_grad_(False)
    report = explain(fully_shard(model, mesh))
    (unit,) = report.units
    frozen, trained = sorted(unit.groups, key=lambda group: group.requires_grad)
    assert not frozen.requires_grad
    assert [buffer.kind for buffer in frozen.resting + frozen.transient] == ["main_weight", "gathered weights"]
    kinds = [buffer.kind for buffer in trained.resting + trained.transient]
    assert kinds == ["main_weight", "gathered weights", "packed gradients", "main_grad"]
    # One collective gathers all groups of a unit.
    gathers = [each for each in report.collectives if each.kind == "all_gather"]
    assert gathers[0].num_bytes == 4 * sum(group.buffer_numel for group in unit.groups)


def test_a_group_tells_its_dtypes_and_where_each_buffer_lies(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float16, main_grads_dtype=torch.float64)
    (unit,) = explain(fully_shard(Block(), mesh, Placements.optim_grads(0), mp_policy=policy)).units
    (group,) = unit.groups
    dtypes = (group.compute_dtype, group.main_dtype, group.reduce_dtype, group.main_grad_dtype)
    assert dtypes == ("bfloat16", "float32", "float16", "float64")
    assert [(buffer.kind, buffer.dtype, buffer.placement) for buffer in (*group.resting, *group.transient)] == [
        ("main_weight", "float32", "axis 0: Flat"),
        ("model_weight", "bfloat16", "axis 0: Replicate"),
        ("packed gradients", "float16", "axis 0: Partial"),
        ("main_grad", "float64", "axis 0: Flat"),
    ]


def test_the_certificate_of_a_group_is_its_plans_and_names_the_parameter_that_binds(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(17, 7, bias=False), mesh)
    assert isinstance(model, FsdpModule)
    layout = model.parameter_groups[0].plan
    (group,) = explain(model).units[0].groups
    assert (group.numel, group.buffer_numel) == (119, layout.numel)
    assert (group.padding_ratio, group.gap) == (layout.padding_ratio, layout.gap)
    assert group.lower_bound_numel == layout.lower_bound_numel
    assert "weight (7, 17)" in group.binding
    assert "tensor" not in group.binding


def test_parameters_outside_of_units_are_listed_and_not_counted(mesh: DeviceMesh) -> None:
    model = Model(1)
    fully_shard(model.blocks[0], mesh)
    report = explain(model)
    assert report.unsharded == ("embedding.weight", "head.weight")
    assert report.unsharded_bytes == 2 * 33 * 4
    assert "in no unit" in str(report)
    assert sum(group.num_parameters for unit in report.units for group in unit.groups) == 4


def test_units_that_no_unit_encloses_are_roots_each(mesh: DeviceMesh) -> None:
    model = Model(3)
    for block in model.blocks:
        fully_shard(block, mesh)
    report = explain(model)
    assert report.num_roots == 3
    assert "call fully_shard on the outermost module" in str(report)
    assert explain(fully_shard(model, mesh)).num_roots == 1


def test_a_part_of_a_unit_can_be_explained(mesh: DeviceMesh) -> None:
    model = Model(1)
    fully_shard([model.embedding, model.head], mesh)
    fully_shard(model, mesh)
    (unit,) = explain(model.head).units
    assert unit.modules == ("Embedding", "Linear")
    assert explain(model.head).forward_peak.num_bytes == unit.transient_bytes("gathered weights")


def test_explaining_changes_nothing_and_says_the_same_in_the_middle_of_a_step(mesh: DeviceMesh) -> None:
    model = Model(2)
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    at_rest = explain(model, 2)
    loss = model(torch.tensor([[1, 4, 7]])).sum()
    state = unit_of(model).weight_state
    registered = [id(parameter) for parameter in model.parameters()]
    assert explain(model, 2) == at_rest
    assert unit_of(model).weight_state is state
    assert [id(parameter) for parameter in model.parameters()] == registered
    loss.backward()
    assert explain(model, 2) == at_rest


# ---------------------------------------------------------------- the page and the data


def test_the_data_survives_json_and_holds_every_total(mesh: DeviceMesh) -> None:
    report = explain(fully_shard(Model(2), mesh), 3)
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["persistent_bytes"] == report.persistent_bytes
    peak = report.backward_peak
    assert data["backward_peak"] == {
        "num_bytes": peak.num_bytes,
        "unit": "Model",
        "gradient_bytes": peak.gradient_bytes,
    }
    assert data["collectives"][0]["count"] == 3
    assert data["units"][0]["groups"][0]["resting"][0]["kind"] == "main_weight"


def test_a_hundred_layers_fit_on_a_page(mesh: DeviceMesh) -> None:
    model = Model(100)
    for block in model.blocks:
        fully_shard(block, mesh)
    page = str(explain(fully_shard(model, mesh)))
    assert "blocks.0 .. blocks.99 (100 alike, each)" in page
    assert len(page.splitlines()) <= 50


def test_the_table_of_units_has_a_line_for_each_size_aligned_and_summed() -> None:
    with world(4) as four:
        report = explain(sharded(Chain(THREE), four))
    page = str(report)
    header, *units, total = page.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in units] == ["Chain", "unit1", "unit2", "unit3"]
    end = header.index("elements") + len("elements")
    for line in (*units[1:], total):
        assert line[end - 1].isdigit()
        assert line[end : end + 1] in ("", " ")
    assert "512 B" in units[2]
    assert total.split()[1:] == ["3", "224", "0.00%", "224", "B"]
    assert report.persistent_bytes == sum(unit.persistent_bytes for unit in report.units) == 224
    assert "1.50 x the largest unit, reached by unit2" in page
    assert "2.50 x the largest unit, beside 32 B of gradients, reached by unit2" in page


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_bytes_are_printed_in_the_largest_unit_that_they_fill(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_replicated_parameters_of_a_sharded_model_are_listed(mesh: DeviceMesh) -> None:
    model = Model()
    fsdp_no_shard(model.blocks[1].get_parameter("up.bias"))
    for block in model.blocks:
        fully_shard(block, mesh)
    report = explain(fully_shard(model, mesh))
    assert "parameters whole on every rank, not sharded: blocks.1\n" in f"{report}\n"
    placements = [group.resting[0].placement for group in report.units[2].groups]
    assert placements == ["axis 0: Flat", "axis 0: Replicate"]
    # Without sharded parameters, the list of unsharded ones is left out.
    assert "not sharded" not in str(explain(fully_shard(Model(), mesh, Placements.no_shard(0))))


def test_a_parameter_frozen_after_sharding_is_seen_before_the_next_forward(mesh: DeviceMesh) -> None:
    model = fully_shard(Model(), mesh)
    before = explain(model)
    model.get_parameter("head.weight").requires_grad_(False)
    after = explain(model)
    assert after.persistent_bytes == before.persistent_bytes
    assert after.optimizer_bytes < before.optimizer_bytes


def test_a_root_that_owns_as_much_as_a_block_is_named_with_the_price(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Embedding(64, 3), nn.Linear(3, 3), nn.Linear(3, 64))
    fully_shard(model[1], mesh)
    report = explain(fully_shard(model, mesh))
    root = next(unit for unit in report.units if unit.is_root)
    held = format_bytes(root.transient_bytes("packed gradients"))
    assert "the root owns parameters itself" in str(report)
    assert f"{held} of packed gradients stay allocated from the head's to the end of backward" in " ".join(
        str(report).split()
    )
    units = Model(2)
    for part in (units.embedding, *units.blocks, units.head, units):
        fully_shard(part, mesh)
    assert "the root owns parameters itself" not in str(explain(units))
