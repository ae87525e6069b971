"""Operations and activations of transformers, against the formulas of the papers they come from."""

from dataclasses import replace

import pytest

from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.transformer import Transformer, Workload

WORK = Workload(micro_batch=2, sequence_length=128)


def transformer(name: str) -> Transformer:
    return Transformer(catalog.architecture(catalog.load(name)))


def operations(model: Transformer, workload: Workload) -> int:
    """Return the operations of all units in an optimizer step."""
    kinds = model.work(workload.sequence_length)
    works = ((unit.count, kinds[unit.name]) for unit in model.architecture.units)
    return workload.num_microbatches * sum(number * each.microbatch(workload) for number, each in works)


@pytest.mark.parametrize(
    ("name", "elements", "copies"),
    [
        # The 34 bytes of Korthikanti et al. without the two bytes of dropout masks.
        ("gpt2", 16 * 768, 0),
        # A gated MLP keeps its two factors, and grouped keys are small.
        ("llama3-8b", 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336, 0),
        # Only the experts that a token is routed to count.
        ("mixtral-8x7b", (4 + 2 * 2 + 2) * 4096 + 2 * 1024 + 4 * 2 * 14336, 2),
        ("qwen3-235b-a22b", (4 + 2 * 8) * 4096 + 2 * (8192 + 512) + 4 * 8 * 1536, 8),
    ],
)
def test_a_layer_keeps_what_each_of_its_parts_needs(name: str, elements: int, copies: int) -> None:
    layer = transformer(name).layers[-1]
    assert (layer.elements, layer.copies) == (elements, copies)


def test_recomputation_keeps_an_input_per_layer_and_one_layer() -> None:
    model = transformer("llama3-8b")
    full = model.activation_bytes(replace(WORK, recompute="full"), 2)
    layer = model.layers[0].elements * 2 * 128 * 2
    assert model.activation_bytes(WORK, 2) - full == 31 * layer - 32 * 2 * 128 * 4096 * 2


@pytest.mark.parametrize(("itemsize", "of_logits"), [(2, 2 + 4 + 4), (4, 4 + 4)])
def test_logits_are_kept_three_times_in_16_bits_and_twice_in_32(itemsize: int, of_logits: int) -> None:
    model = transformer("llama3-8b")
    found = model.activation_bytes(Workload(1, 1, recompute="full"), itemsize)
    assert found == (model.layers[0].elements + (32 + 2) * 4096) * itemsize + 128256 * of_logits


def test_a_dense_step_takes_6_operations_per_weight_and_12_per_attended_element() -> None:
    weights = 8_030_261_248 - 128256 * 4096
    found = operations(transformer("llama3-8b"), Workload(1, 4096, 3))
    assert found == 3 * 4096 * (6 * weights + 12 * 32 * 4096 * 4096)


def test_recomputation_takes_8_operations_per_weight_of_a_layer() -> None:
    model, work = transformer("llama3-8b"), Workload(1, 1)
    more = operations(model, replace(work, recompute="full")) - operations(model, work)
    assert more == 2 * 32 * 218_112_000 + 4 * 32 * 4096


def test_only_chosen_experts_compute() -> None:
    model = transformer("mixtral-8x7b")
    active = model.architecture.num_active_parameters
    assert operations(model, Workload(1, 1)) == 6 * (active - 32000 * 4096) + 12 * 32 * 4096


def test_a_tied_embedding_is_an_output_matrix() -> None:
    assert transformer("gemma-2-9b").work(1)["embedding"].matrix == 2 * 256000 * 3584
    assert transformer("llama3-8b").work(1)["embedding"].matrix == 0
