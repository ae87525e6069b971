"""PyTorch's functions give the same results on sharded tensors as on plain ones, and keep rows sharded if possible."""

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from dbuffer import CollectiveCall, DBuffer, FlatDTensor, PlacementError, observe_collectives
from tests.functional.dbuffer.dtensor.operator_cases import (
    ELEMENT_WISE,
    LAYOUTS,
    OTHER_ROWS,
    SHAPES,
    agree,
    differences,
    in_other_rows,
    make_mesh,
    num_ranks,
    sharded,
    values,
    whole,
)
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but

CHECKED = [
    *(("three ranks", table) for table in ("element-wise", "whole", "reductions", "random", "rare")),
    *(("hfsdp", table) for table in ("element-wise", "whole", "reductions", "random")),
    *((layout, table) for layout in ("one rank", "hsdp", "four ranks") for table in ("reductions", "random")),
    *(("replicated", table) for table in ("whole", "random")),
    *(("inside slices", table) for table in ("element-wise", "whole", "reductions", "random", "rare")),
    *(("inside slices, hfsdp", table) for table in ("whole", "random")),
]

QUICK = {("three ranks", "reductions"), ("three ranks", "rare")}
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CHECKED]


@pytest.mark.parametrize(("layout", "table"), CASES)
def test_a_function_of_sharded_tensors_is_that_of_whole_ones(layout: str, table: str) -> None:
    found = run_ranks(num_ranks(layout), differences, layout, table, torch.float32, 1e-5, timeout=200)
    assert found == [[]] * num_ranks(layout)


@pytest.mark.slow
@pytest.mark.parametrize(("table", "tolerance"), [("element-wise", 0.0), ("whole", 1e-2), ("reductions", 1e-2)])
def test_a_function_of_sharded_bf16_tensors_is_that_of_whole_ones(table: str, tolerance: float) -> None:
    found = run_ranks(2, differences, "two ranks", table, torch.bfloat16, tolerance, timeout=200)
    assert found == [[]] * 2


@pytest.mark.parametrize("layout", nightly_but(["hfsdp"], ["three ranks", "hsdp", "hfsdp", "inside slices"]))
@on_ranks(lambda layout: num_ranks(layout))
def test_element_wise_functions_keep_the_rows_without_communication(layout: str) -> None:
    found, mesh = [], make_mesh(layout)
    for name, function in ELEMENT_WISE.items():
        if "sharded scale" in name or "sum" in name or name in ("lerp", "broadcast", "column scale"):
            continue
        faces = [sharded(layout, values(seed), mesh) for seed in (1, 2)]
        for index in (0, SHAPES.index((2, 5, 3))):
            x, y = (face[index] for face in faces)
            calls: list[object] = []
            with torch.no_grad(), observe_collectives(calls.append):
                try:
                    result = function(x, y)
                except RuntimeError:
                    continue
            results = [one for one in (result if isinstance(result, (tuple, list)) else [result]) if one is not None]
            if calls:
                found.append(f"{name} communicates: {calls}")
            if not all(type(one) is FlatDTensor and one.placements == x.placements for one in results):
                found.append(f"{name} returns {results}")
            if any(type(placement) is Shard for one in results for placement in one.placements):
                found.append(f"{name} forgets rows: {results}")
    assert found == []


Mix = Callable[[torch.Tensor, torch.Tensor], object]
MIXES: dict[str, Mix] = {
    "sum": lambda x, y: x + y,
    "reflected": lambda x, y: y - x,
    "in place": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "in place of the other": lambda x, y: [y.add_(x), y],
    "copy_ to the other": lambda x, y: [y.copy_(x), y],
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcdiv": lambda x, y: x.addcdiv_(y, y.abs() + 1),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "maximum": lambda x, y: torch.maximum(y, x),
    "foreach": lambda x, y: torch._foreach_add([x, x], [y, y]),
    "foreach in place": lambda x, y: [torch._foreach_lerp_([x], [y], 0.5), x],
    "foreach of the other": lambda x, y: [torch._foreach_mul_([y], [x]), y],
    "foreach copy": lambda x, y: [torch._foreach_copy_([x], [y]), x],  # type: ignore[func-returns-value]  # None is dropped
    "product": lambda x, y: torch.tensordot(x, y, dims=x.ndim),
    "cat": lambda x, y: torch.cat([y, x]),
    "equal": lambda x, y: torch.equal(x, y),
    "broadcast": lambda x, y: x * y[0] if y.shape[0] else x,
    "norms": lambda x, y: torch._foreach_norm([x, y]),
    "data": lambda x, y: [setattr(x, "data", y), x],  # type: ignore[func-returns-value]  # None is dropped
}


NUM_PARTS = 9
ROWS = nightly_but(
    [("three ranks", 0), ("hfsdp", 3), ("inside slices", 6)],
    product(("three ranks", "hsdp", "hfsdp", "inside slices"), range(NUM_PARTS)),
)


@pytest.mark.parametrize(("layout", "part"), ROWS)
@on_ranks(lambda layout: num_ranks(layout))
def test_operands_in_other_rows_are_brought_into_these(layout: str, part: int) -> None:
    found, mesh = [], make_mesh(layout)
    for number, (kind, (name, function)) in enumerate(product(OTHER_ROWS, MIXES.items())):
        faces = sharded(layout, values(1), mesh)
        for position, (shape, x, y, face) in enumerate(zip(SHAPES, values(1), values(2), faces, strict=True)):
            if (number + position) % NUM_PARTS == part:
                wanted = function(x, y.clone())
                with torch.no_grad():
                    result = whole(function(face, in_other_rows(y, face, kind)))
                if not agree(result, wanted, 1e-5):
                    found.append(f"{name} with one {kind} of {shape}: {result}, wanted {wanted}")
    assert found == []


REFUSED: dict[str, Callable[[FlatDTensor], object]] = {
    "a plain operand": lambda face: face + torch.ones(13, 4),
    "a plain operand in place": lambda face: face.copy_(torch.ones(13, 4)),
    "a row in place": lambda face: face.__setitem__(slice(0, 1), torch.ones(1, 4)),
    "another shape in place": lambda face: face.t_(),
    "resizing": lambda face: face.resize_(2, 2),
    "sharing memory": lambda face: face.share_memory_(),
    "DLPack": lambda face: face.__dlpack__(),
    "data of another dtype": lambda face: setattr(face, "data", face.double()),
    "data of another shape": lambda face: setattr(face, "data", face[1:]),
    "fused state in other rows": lambda face: torch._fused_adam_(
        [face], [face], [in_other_rows(torch.ones(13, 4), face, "cut by torch")], [face.clone()], [],
        [torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    ),
}  # fmt: skip


@on_ranks(2)
def test_operators_without_a_right_result_are_refused_and_change_nothing() -> None:
    mesh = make_mesh("two ranks")
    for name, function in REFUSED.items():
        face = sharded("two ranks", values(1), mesh)[-1]
        with torch.no_grad(), pytest.raises(PlacementError) as refused:
            function(face)
        assert torch.equal(face.full_tensor(), values(1)[-1]), name
        if name == "a plain operand":
            assert "[Replicate()] * p.device_mesh.ndim" in str(refused.value)


def kept(copied: object, face: FlatDTensor) -> bool:
    """Check that a copy has the values, rows and class of the original, in memory that they do not share."""
    assert isinstance(copied, FlatDTensor)
    is_same = copied.placements == face.placements and torch.equal(copied.full_tensor(), face.full_tensor())
    before = face.full_tensor()
    with torch.no_grad():
        (copied.detach() * 1).zero_()
        copied.zero_()
    return is_same and torch.equal(face.full_tensor(), before) and not copied.full_tensor().any()


def through_file(face: torch.Tensor, *, weights_only: bool) -> object:
    buffer = io.BytesIO()
    torch.save({"face": face}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)["face"]


COPIES: dict[str, Callable[[FlatDTensor], object]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a view": lambda face: copy.deepcopy(face[1:]),
    "deepcopy of a flat view": lambda face: copy.deepcopy(face.flatten()),
    "pickle": lambda face: pickle.loads(pickle.dumps(face)),
    "save and load": lambda face: through_file(face, weights_only=True),
    "save and load of a view": lambda face: through_file(face.T, weights_only=True),
    "save and load anything": lambda face: through_file(face, weights_only=False),
    "from_local": lambda face: type(face).from_local(
        face.to_local().clone(), face.device_mesh, face.placements, shape=face.shape, stride=face.stride()
    ),
    "redistribute there and back": lambda face: face.redistribute(placements=[Replicate()]).redistribute(
        placements=face.placements
    ),
}
ORIGINALS: dict[str, Callable[[Any], Any]] = {
    "deepcopy of a view": lambda face: face[1:],
    "deepcopy of a flat view": lambda face: face.flatten(),
    "save and load of a view": lambda face: face.T,
}


@on_ranks(3)
def test_copies_and_pickles_are_whole_again_and_independent() -> None:
    mesh, found = make_mesh("three ranks"), []
    with torch.no_grad():
        for name, duplicate in COPIES.items():
            face = sharded("three ranks", values(1), mesh)[-1]
            if not kept(duplicate(face), ORIGINALS.get(name, lambda same: same)(face)):
                found.append(name)
    assert found == []


@on_ranks(3)
def test_parameters_are_what_they_should_be() -> None:
    mesh = make_mesh("three ranks")
    face = sharded("three ranks", values(1), mesh)[-1]
    parameter: Any = nn.Parameter(face)
    parameter.grad = torch.ones_like(face)
    parameter.name_of_ours = "kept"
    twin = copy.deepcopy(parameter)
    address = face.to_local().untyped_storage().data_ptr()
    parameter.data = parameter.detach() * 2
    shards = face.redistribute(placements=[Shard(0)])
    facts = {
        "a parameter": isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor),
        "its own kind": type(parameter) is FlatDTensor and type(parameter.detach()) is FlatDTensor,
        "shares memory": parameter.to_local().untyped_storage().data_ptr() == address,
        "a twin": isinstance(twin, nn.Parameter) and twin.requires_grad and twin.name_of_ours == "kept",  # type: ignore[attr-defined]  # set above
        "a twin's gradient": type(twin.grad) is FlatDTensor and twin.grad is not parameter.grad,
        "data was set": torch.equal(face.full_tensor(), 2 * values(1)[-1]),
        "cut by torch": shards.to_local().shape[0] == len(torch.chunk(values(1)[-1], 3)[dist.get_rank()]),
        "cut by torch is whole": torch.equal(shards.full_tensor(), 2 * values(1)[-1]),
        "no rows are chunks": face.to_local().shape != shards.to_local().shape or dist.get_rank() > 0,
        "hash": hash(face) == hash(face) and face in {face},
        "iterable": len(list(face)) == len(face) == 13,
        "printable": "RaggedShard" in repr(face) and "RaggedShard" in f"{face}",
    }
    assert [name for name, is_true in facts.items() if not is_true] == []


@on_ranks(3)
def test_a_gradient_scaler_tells_every_rank_of_one_ranks_infinity() -> None:
    mesh = make_mesh("three ranks")
    faces = sharded("three ranks", values(1), mesh)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(faces, found, torch.tensor(0.5))
    right = all(torch.equal(face.full_tensor(), value * 0.5) for face, value in zip(faces, values(1), strict=True))
    before = found.item()
    if dist.get_rank() == 1:
        faces[-1].to_local()[0] = float("inf")
    torch._amp_foreach_non_finite_check_and_unscale_(faces, found, torch.tensor(0.5))
    assert right
    assert before == 0.0
    assert found.item() == 1.0


@on_ranks(3)
def test_parts_of_complex_numbers_share_their_memory() -> None:
    plain = torch.randn(7, 3, dtype=torch.complex64)
    face = sharded("three ranks", [plain], make_mesh("three ranks"))[0]
    for tensor in (face, plain):
        tensor.real.mul_(2.0)
        torch.imag(tensor).fill_(3.0)
    assert torch.equal(face.full_tensor(), plain)
    assert torch.equal((face.real + face.imag).full_tensor(), plain.real + plain.imag)


@on_ranks(3)
def test_writing_through_views_works_in_inference_mode() -> None:
    mesh = make_mesh("three ranks")
    face = sharded("three ranks", values(1), mesh)[-1]
    plain = values(1)[-1]
    with torch.inference_mode():
        face[3].fill_(2.0)
        face.T.mul_(3.0)
        face.add_(1.0)
    plain[3].fill_(2.0)
    plain.mul_(3.0).add_(1.0)
    assert torch.equal(face.full_tensor(), plain)


@on_ranks(3)
def test_a_plain_scale_gets_the_gradient_of_all_rows() -> None:
    mesh = make_mesh("three ranks")
    face = nn.Parameter(sharded("three ranks", values(1), mesh)[-1])
    scale = torch.tensor(2.0, requires_grad=True)
    (face * scale).sum().backward()
    found, wanted = scale.grad.item(), values(1)[-1].sum().item()
    assert found == pytest.approx(wanted, rel=1e-5)


@on_ranks(2)
def test_calls_that_autograd_would_get_wrong_are_refused_and_change_nothing() -> None:
    mesh = make_mesh("two ranks")
    functions: list[Callable[[torch.Tensor], object]] = [
        lambda p: p.mul_(2),
        lambda p: p.normal_(),
        lambda p: p.__setitem__(0, 1.0),
        lambda p: torch._foreach_mul([p], 2.0),
        lambda p: (p * 2).retain_grad(),
        lambda p: nn.functional.relu(p, inplace=True),
        lambda p: torch.add(p, 1, out=p.detach()),
        lambda p: torch.autograd.grad((p * p).sum(), [p], create_graph=True)[0].sum().backward(),
    ]
    for function in functions:
        face = sharded("two ranks", values(1), mesh)[-1]
        with pytest.raises(
            (RuntimeError, PlacementError), match=r"torch\.no_grad\(\)" if function is functions[0] else None
        ):
            function(nn.Parameter(face))
        assert torch.equal(face.full_tensor(), values(1)[-1])


def test_every_layout_has_its_number_of_ranks() -> None:
    assert {layout: num_ranks(layout) for layout in LAYOUTS}["hfsdp"] == 4


@on_ranks(3)
def test_random_functions_draw_without_gathering() -> None:
    mesh = make_mesh("three ranks")
    calls: list[CollectiveCall] = []
    face = sharded("three ranks", values(1), mesh)[-1]
    with observe_collectives(calls.append):
        nn.init.kaiming_uniform_(face)
        nn.init.trunc_normal_(face)
        torch.rand_like(face)
        face.exponential_()
    assert [call.kind for call in calls if call.kind != "all_reduce"] == []


@on_ranks(2)
def test_a_buffer_takes_sharded_tensors_that_were_made_whole() -> None:
    mesh = make_mesh("two ranks")
    faces = sharded("two ranks", values(1), mesh)
    again = DBuffer.distribute_tensors([face.full_tensor() for face in faces], mesh, list(LAYOUTS["two ranks"][1]))
    assert all(torch.equal(again.get_dtensor(index), face) for index, face in enumerate(faces))
