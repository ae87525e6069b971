"""The padding table is generated from the planner, and its text about other layouts is right."""

import pytest
import torch

from benchmarks import bench_planner
from benchmarks.bench_planner import common_multiple_numel, dim_0_numel, padding_of


def test_the_table_in_the_documentation_is_what_the_bench_generates() -> None:
    assert bench_planner.DOCUMENT.read_text(encoding="utf-8") == bench_planner.document()


@pytest.mark.parametrize("shape", [(7, 3), (8, 3), (1, 5), (64,), (8, 28, 4)])
@pytest.mark.parametrize("shards", [1, 2, 3, 8, 64])
def test_chunks_of_the_first_dim_are_those_of_torch_padded_to_the_largest(shape: tuple[int, ...], shards: int) -> None:
    largest = max(chunk.numel() for chunk in torch.chunk(torch.empty(shape), shards))
    assert dim_0_numel([shape], shards) == largest * shards


def test_a_common_multiple_of_widths_without_common_factors_is_their_product() -> None:
    assert common_multiple_numel([(10, 7), (10, 9), (5,)], 4) == 7 * 9 * 8 * 4


@pytest.mark.parametrize(("name", "shards"), [("gpt2", 1024), ("siglip-so400m", 512), ("llama3-8b", 64)])
def test_default_rows_and_multiple_come_in_this_order(name: str, shards: int) -> None:
    found = padding_of(name, shards)
    assert 0 <= found.default <= found.rows <= found.multiple
    assert (found.relaxed > 0) == (found.default < found.rows)
