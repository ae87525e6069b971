"""Views define the matrices of a parameter; every element is in exactly one of them, on every shard."""

import itertools

import pytest
import torch

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.muon import MatrixView
from megatron_fsdp.optim.muon.matrix_views import MatrixBlock

SHAPE = (3, 12, 7)
VIEWS = {
    "experts": MatrixView(batch_dims=1),
    "heads": MatrixView(batch_dims=1, row_splits=(4,)),
    "joined": MatrixView(batch_dims=1, row_splits=(3, 1, 2), is_joined=True),
}


def taken(block: MatrixBlock, held: range) -> torch.Tensor:
    """Read a matrix from a flat range by its pieces; elements outside of the range are -1."""
    flat = torch.arange(held.start, held.stop)
    found = torch.full((block.rows * block.columns,), -1)
    for piece in block.pieces(held):
        found[piece.place : piece.place + piece.numel] = flat[piece.start : piece.start + piece.numel]
    return found.view(block.rows, block.columns)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_matrices_of_a_parameter_have_each_element_once(view: MatrixView) -> None:
    whole = range(3 * 12 * 7)
    elements = torch.cat([taken(block, whole).flatten() for block in view.blocks(SHAPE, "experts")])
    assert elements.sort().values.tolist() == list(whole)


def test_joined_blocks_are_those_of_one_position() -> None:
    parameter = torch.arange(12 * 2).view(12, 2)
    blocks = MatrixView(row_splits=(3, 1, 2), is_joined=True).blocks((12, 2), "qkv")
    rows = [[0, 1, 2, 6, 7, 8], [3, 9], [4, 5, 10, 11]]
    assert [taken(block, range(24)).tolist() for block in blocks] == [parameter[picked].tolist() for picked in rows]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("step", [1, 5, 7, 50, 84])
def test_shards_of_any_length_hold_a_matrix_together(view: MatrixView, step: int) -> None:
    bounds = [*range(0, 252, step), 252]
    for block in view.blocks(SHAPE, "experts"):
        whole = taken(block, range(252))
        parts = [taken(block, range(start, stop)) for start, stop in itertools.pairwise(bounds)]
        assert torch.equal(torch.stack(parts).amax(0), whole)
        assert sum(int((part >= 0).sum()) for part in parts) == block.numel
        held = [range(start, stop) for start, stop in itertools.pairwise(bounds)]
        assert [block.overlap(each) for each in held] == [int((part >= 0).sum()) for part in parts]


def test_a_view_survives_a_param_group() -> None:
    view = VIEWS["joined"]
    assert MatrixView.of(view.to_plain()) == view
    assert MatrixView.of(None) == MatrixView()


@pytest.mark.parametrize(
    ("view", "shape", "words"),
    [
        (MatrixView(), (5,), ["'bias'", "(5,)", "use_muon=False"]),
        (MatrixView(), (3, 5, 7), ["'bias'", "batch_dims=1"]),
        (MatrixView(row_splits=(4,)), (6, 2), ["'bias'", "row_splits=(4,)", "6"]),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_with_its_name(
    view: MatrixView, shape: tuple[int, ...], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        view.blocks(shape, "parameter 'bias'")
    assert all(word in str(error.value) for word in words)


def test_a_view_with_unknown_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads"):
        MatrixView.of({"heads": 3})
    with pytest.raises(ConfigError, match="at least 1"):
        MatrixView.of({"row_splits": (0,)})
