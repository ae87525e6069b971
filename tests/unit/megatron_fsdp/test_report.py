"""The report: numbers worked out by hand, what it says about a live model, and the page that it prints."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dbuffer import Flat, Partial, Replicate, plan
from megatron_fsdp import ConfigError, FsdpModule, MixedPrecisionPolicy, Placements, StateError, explain, fully_shard
from megatron_fsdp.facts import AxisFacts, GroupFacts, ModelFacts, Transfer, UnitFacts, Visit, VisitKind
from megatron_fsdp.precision import GroupDtypes
from megatron_fsdp.report import CollectiveTotal, PeakReport, report_of
from megatron_fsdp.report_page import format_bytes

FP32 = GroupDtypes(torch.float32, torch.float32, torch.float32, torch.float32)
BF16 = GroupDtypes(torch.bfloat16, torch.float32, torch.float32, torch.float32)
NUM_RANKS = 6

# ---------------------------------------------------------------- from facts alone, against numbers worked out by hand


def group_of(
    rows: int, placements: Placements | None = None, dtypes: GroupDtypes = FP32, sizes: tuple[int, ...] = (4,)
) -> GroupFacts:
    """A weight of ``rows`` rows of 4 elements, which 16 bytes align in FP32: nothing is padded if ranks divide rows."""
    axes = tuple(AxisFacts(f"axis{position}", size, size - 1) for position, size in enumerate(sizes))
    placements = placements or Placements.optim_grads_params(0)
    layout = plan([(rows, 4)], placements.num_shards(sizes), itemsize=4)
    return GroupFacts(("weight",), layout, axes, placements, dtypes, requires_grad=True)


def chain(*groups: GroupFacts) -> ModelFacts:
    """A root without parameters around units of one group each, which run one after the other."""
    units = [UnitFacts("root", (), reshards_after_forward=False)]
    units += [UnitFacts(f"unit{number}", (group,)) for number, group in enumerate(groups, start=1)]
    visits = [Visit(VisitKind.OPEN, 0)]
    for number in range(1, len(units)):
        visits += [Visit(VisitKind.OPEN, number), Visit(VisitKind.USE, number, 0), Visit(VisitKind.CLOSE, number)]
    return ModelFacts(tuple(units), (*visits, Visit(VisitKind.CLOSE, 0)))


def three_units(dtypes: GroupDtypes = FP32, placements: Placements | None = None) -> ModelFacts:
    """Buffers of 64, 128 and 32 elements."""
    return chain(*(group_of(rows, placements, dtypes) for rows in (16, 32, 8)))


def test_a_sharded_model_rests_as_a_weight_shard_and_a_gradient_shard() -> None:
    # 64 + 128 + 32 elements of 4 bytes, twice, over 4 ranks.
    assert report_of(three_units()).persistent_bytes == 224 * 4 * 2 // 4


def test_a_replicated_model_rests_whole_but_the_optimizer_works_on_a_slice() -> None:
    report = report_of(three_units(placements=Placements.optim(0)))
    # Weights and gradients whole, main weights a slice of the former. Two moments of 56 elements, three step counts.
    assert report.persistent_bytes == 224 * 4 * 2
    assert report.optimizer_bytes == 2 * 56 * 4 + 3 * 4
    assert [buffer.shares for buffer in report.units[1].groups[0].resting] == ["model_weight", "", ""]


def test_main_weights_of_another_dtype_have_memory_of_their_own() -> None:
    report = report_of(three_units(BF16, Placements.optim(0)))
    # Per element: 2 bytes of bf16 weights, 4 of FP32 gradients; and a quarter of 4 of FP32 weights.
    assert report.persistent_bytes == 224 * (2 + 4) + 56 * 4


def test_forward_holds_a_unit_and_the_one_gathered_ahead() -> None:
    report = report_of(three_units())
    assert report.forward_peak == PeakReport((64 + 128) * 4, "unit2")
    assert (report.largest_unit, report.largest_unit_bytes) == ("unit2", 128 * 4)


def test_backward_holds_a_unit_the_one_gathered_ahead_and_one_packed_buffer() -> None:
    # unit2 with its gradients packed, while unit1 is gathered ahead: 128 + 128 + 64 elements.
    assert report_of(three_units()).backward_peak == PeakReport((128 + 128 + 64) * 4, "unit2")


def test_gradients_that_are_reduced_in_fp32_count_twice_against_bf16_weights() -> None:
    report = report_of(three_units(BF16))
    assert report.forward_peak.num_bytes == (64 + 128) * 2
    assert report.backward_peak.num_bytes == (128 + 64) * 2 + 128 * 4


def test_a_root_that_keeps_its_weights_adds_them_to_every_peak() -> None:
    facts = three_units()
    root = replace(facts.units[0], groups=(group_of(4),))
    facts = ModelFacts((root, *facts.units[1:]), (facts.visits[0], Visit(VisitKind.USE, 0, 0), *facts.visits[1:]))
    report = report_of(facts)
    assert report.forward_peak.num_bytes == (16 + 64 + 128) * 4
    assert report.backward_peak.num_bytes == (16 + 128 + 128 + 64) * 4


def test_weights_that_rest_whole_need_no_transient_memory_in_forward() -> None:
    for strategy in (Placements.no_shard(0), Placements.optim(0), Placements.optim_grads(0)):
        assert report_of(three_units(placements=strategy)).forward_peak == PeakReport(0, "")


def test_each_strategy_issues_its_collectives_per_microbatch_or_per_step() -> None:
    def issued(placements: Placements) -> list[tuple[str, str, int, int]]:
        totals = report_of(three_units(placements=placements), 5).collectives
        return [(total.phase, total.kind, total.count, total.num_bytes) for total in totals]

    whole = 224 * 4
    assert issued(Placements.no_shard(0)) == [("backward", "all_reduce", 3, whole)]
    assert issued(Placements.optim(0)) == [("backward", "reduce_scatter", 3, whole), ("step", "all_gather", 3, whole)]
    assert issued(Placements.optim_grads(0)) == [
        ("backward", "reduce_scatter", 15, 5 * whole),
        ("step", "all_gather", 3, whole),
    ]
    assert issued(Placements.optim_grads_params(0)) == [
        ("forward", "all_gather", 15, 5 * whole),
        ("backward", "all_gather", 15, 5 * whole),
        ("backward", "reduce_scatter", 15, 5 * whole),
    ]


def test_hybrid_sharding_reduces_the_outer_axis_once_per_step_in_pieces_of_an_inner_shard() -> None:
    report = report_of(chain(group_of(16, Placements.hsdp(0, 1), sizes=(2, 4))), 3)
    assert report.collectives == (
        CollectiveTotal("forward", "all_gather", "axis1", 4, 3, 3 * 64 * 4),
        CollectiveTotal("backward", "all_gather", "axis1", 4, 3, 3 * 64 * 4),
        CollectiveTotal("backward", "all_reduce", "axis0", 2, 1, 16 * 4),
        CollectiveTotal("backward", "reduce_scatter", "axis1", 4, 3, 3 * 64 * 4),
    )


def test_an_axis_of_one_rank_issues_nothing() -> None:
    assert report_of(chain(group_of(16, sizes=(1,)))).collectives == ()


def test_a_change_on_two_axes_goes_through_an_intermediate_buffer() -> None:
    both = Placements((0, 1), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat()))
    group = group_of(16, both, sizes=(2, 4))
    # 8 elements rest; 16 after the gather over axis0, which are gathered over axis1 into the 64.
    assert group.gather().transfers == (
        Transfer("all_gather", "axis0", 2, 16 * 4),
        Transfer("all_gather", "axis1", 4, 64 * 4),
    )
    assert group.gather().scratch_bytes == 16 * 4


def test_two_partial_axes_are_reduced_one_after_the_other() -> None:
    both = Placements((0, 1), (Replicate(), Replicate()), (Partial(), Partial()), (Replicate(), Replicate()))
    group = group_of(16, both, sizes=(2, 4))
    assert [transfer.axis for transfer in group.finalize().transfers] == ["axis1", "axis0"]
    assert group.reduce().transfers == ()


def test_padding_is_counted_on_the_rank_that_holds_it() -> None:
    axes = [AxisFacts("axis0", 3, rank) for rank in range(3)]
    layout = plan([(4, 4)], 3, itemsize=4)
    groups = [GroupFacts(("weight",), layout, (axis,), Placements.optim_grads_params(0), FP32, True) for axis in axes]
    padded = [report_of(chain(group)).padding_bytes for group in groups]
    # Rows of 16 bytes in shards of two rows: the third shard is empty; weights and gradients.
    assert padded == [0, 0, 2 * 8 * 4]
    assert [report_of(chain(group)).optimizer_bytes for group in groups] == [2 * 8 * 4 + 4, 2 * 8 * 4 + 4, 4]


def test_gradients_of_another_dtype_are_copied_for_the_optimizer() -> None:
    dtypes = replace(FP32, main_grad=torch.bfloat16)
    assert report_of(three_units(dtypes)).step_peak.num_bytes == 224 * 4 // 4


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        report_of(three_units(), 0)


# ---------------------------------------------------------------- of a live model


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


def test_a_unit_without_parameters_of_its_own_says_so(mesh: DeviceMesh) -> None:
    model = nn.Sequential(Block())
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    root, block = explain(model).units
    assert "no parameters of its own" in root.note
    assert "no parameters of its own" in root.reason
    assert block.note == ""


def test_the_reason_for_keeping_weights_is_told(mesh: DeviceMesh) -> None:
    model = Model(3)
    fully_shard(model.blocks[0], mesh)
    fully_shard(model.blocks[1], mesh, reshard_after_forward=False)
    fully_shard(model.blocks[2], mesh, Placements.optim(0))
    fully_shard(model, mesh)
    reasons = {unit.name: (unit.reshards_after_forward, unit.reason) for unit in explain(model).units}
    assert reasons == {
        "Model": (False, "kept after forward: it is the root"),
        "blocks.0": (True, "released after forward: the default below the root"),
        "blocks.1": (False, "kept after forward: reshard_after_forward=False"),
        "blocks.2": (True, "nothing to release: its weights rest whole on every rank"),
    }


def test_ties_name_every_place_of_a_parameter(mesh: DeviceMesh) -> None:
    model = Model(1)
    model.head.weight = model.embedding.weight
    report = explain(fully_shard(model, mesh))
    assert report.units[0].ties == (("embedding.weight", "head.weight"),)
    assert report.units[0].groups[0].num_parameters == 5
    assert "tied parameters: embedding.weight = head.weight" in str(report)


def test_frozen_parameters_form_a_group_without_gradient_buffers(mesh: DeviceMesh) -> None:
    model = Block()
    model.up.requires_grad_(False)
    (unit,) = explain(fully_shard(model, mesh)).units
    frozen, trained = sorted(unit.groups, key=lambda group: group.requires_grad)
    assert unit.num_frozen_groups == 1
    assert [buffer.kind for buffer in frozen.resting] == ["main_weight", "model_weight"]
    assert [buffer.kind for buffer in trained.resting] == ["main_weight", "model_weight", "main_grad"]
    assert [collective.kind for collective in frozen.collectives] == ["all_gather"]


def test_a_group_tells_its_dtypes_and_where_each_buffer_lies(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float16, main_grads_dtype=torch.float64)
    (unit,) = explain(fully_shard(Block(), mesh, Placements.optim_grads(0), mp_policy=policy)).units
    (group,) = unit.groups
    dtypes = (group.compute_dtype, group.main_dtype, group.reduce_dtype, group.main_grad_dtype)
    assert dtypes == ("bfloat16", "float32", "float16", "float64")
    assert [(buffer.kind, buffer.dtype, buffer.placement) for buffer in (*group.resting, *group.transient)] == [
        ("main_weight", "float32", "axis 0: Flat"),
        ("model_weight", "bfloat16", "axis 0: Replicate"),
        ("main_grad", "float64", "axis 0: Flat"),
        ("packed gradients", "float16", "axis 0: Partial"),
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
    states = [group.weight_state for group in model.parameter_groups]
    registered = [id(parameter) for parameter in model.parameters()]
    assert explain(model, 2) == at_rest
    assert [group.weight_state for group in model.parameter_groups] == states
    assert [id(parameter) for parameter in model.parameters()] == registered
    loss.backward()
    assert explain(model, 2) == at_rest


# ---------------------------------------------------------------- the page and the data


def test_the_data_survives_json_and_holds_every_total(mesh: DeviceMesh) -> None:
    report = explain(fully_shard(Model(2), mesh), 3)
    data = report.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["persistent_bytes"] == report.persistent_bytes
    assert data["backward_peak"] == {"num_bytes": report.backward_peak.num_bytes, "unit": "Model"}
    assert data["collectives"][0]["count"] == 3
    assert data["units"][0]["groups"][0]["resting"][0]["kind"] == "main_weight"


def test_a_hundred_layers_fit_on_a_page(mesh: DeviceMesh) -> None:
    model = Model(100)
    for block in model.blocks:
        fully_shard(block, mesh)
    page = str(explain(fully_shard(model, mesh)))
    assert "blocks.0 .. blocks.99 (100 alike, each)" in page
    assert len(page.splitlines()) <= 50


def test_units_of_different_sizes_have_lines_of_their_own() -> None:
    lines = str(report_of(three_units())).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["root", "unit1", "unit2", "unit3"]
    assert "512 B" in lines[3]
    assert "256 B" in lines[2]


def test_columns_of_the_unit_table_are_aligned() -> None:
    header, _, *units, total = str(report_of(three_units())).split("\n\n")[0].splitlines()
    end = header.index("elements") + len("elements")
    for line in (*units, total):
        assert line[end - 1].isdigit()
        assert line[end : end + 1] in ("", " ")


def test_the_total_line_sums_the_units() -> None:
    report = report_of(three_units())
    total = next(line for line in str(report).splitlines() if line.startswith("total "))
    assert total.split()[1:] == ["3", "224", "0.00%", "448", "B"]
    assert report.persistent_bytes == sum(unit.persistent_bytes for unit in report.units) == 448


def test_peaks_are_printed_as_multiples_of_the_largest_unit() -> None:
    page = str(report_of(three_units()))
    assert "1.50 B, reached by unit2" in page
    assert "2.50 B, reached by unit2" in page


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
