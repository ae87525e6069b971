"""Operations and activations of transformers, against the formulas of the papers they come from."""

from dataclasses import replace

import pytest

from megatron_fsdp.planning import catalog
from megatron_fsdp.planning.transformer import LayerShape, Recompute, Transformer, Workload

WORK = Workload(micro_batch=2, sequence_length=128)


def transformer(name: str) -> Transformer:
    return Transformer(catalog.architecture(catalog.load(name)))


def operations(model: Transformer, workload: Workload) -> int:
    """Return those of all units in an optimizer step."""
    kinds = model.work(workload.sequence_length)
    works = ((unit.count, kinds[unit.name]) for unit in model.architecture.units)
    return workload.num_microbatches * sum(n * (each.forward(workload) + each.backward(workload)) for n, each in works)


def gpt(hidden: int, heads: int) -> LayerShape:
    return LayerShape(1, hidden, 2, heads, hidden, hidden, 4 * hidden, is_gated=False)


@pytest.mark.parametrize(("hidden", "heads"), [(64, 4), (768, 12)])
def test_a_gpt_layer_keeps_what_korthikanti_et_al_say(hidden: int, heads: int) -> None:
    work = replace(WORK, fused_attention=False, dropout=True)
    tokens, length = 2 * 128, 128
    expected = tokens * hidden * 34 + 5 * heads * length * tokens
    assert gpt(hidden, heads).activation_bytes(work, 2) == expected


def test_selective_recomputation_leaves_34_bytes_per_element() -> None:
    work = replace(WORK, fused_attention=False, dropout=True, recompute=Recompute.SELECTIVE)
    assert gpt(64, 4).activation_bytes(work, 2) == 2 * 128 * 64 * 34


def test_the_catalogs_gpt2_has_the_shape_of_a_gpt() -> None:
    assert transformer("gpt2").layers == (replace(gpt(768, 12), count=12),)


def test_a_gated_mlp_keeps_its_two_factors_and_grouped_keys_are_small() -> None:
    (layer,) = transformer("llama3-8b").layers
    assert (layer.is_gated, layer.mlp_width, layer.key_value_width) == (True, 14336, 1024)
    elements = 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    assert layer.activation_bytes(Workload(1, 1), 2) == 2 * elements


@pytest.mark.parametrize(
    ("name", "width", "copies"),
    [
        ("mixtral-8x7b", 2 * 14336, 2),
        ("qwen3-235b-a22b", 8 * 1536, 8),
        ("deepseek-v3", 9 * 2048, 8),
        ("gpt-oss-120b", 4 * 2880, 4),
    ],
)
def test_routed_experts_count_as_a_token_sees_them(name: str, width: int, copies: int) -> None:
    layer = transformer(name).layers[-1]
    assert (layer.mlp_width, layer.copies) == (width, copies)


def test_full_recomputation_keeps_an_input_per_layer_and_one_layer() -> None:
    model = transformer("llama3-8b")
    full = model.activation_bytes(replace(WORK, recompute=Recompute.FULL), 2)
    none = model.activation_bytes(WORK, 2)
    layer = model.layers[0].activation_bytes(WORK, 2)
    assert none - full == 31 * layer - 32 * 2 * 128 * 4096 * 2


def test_logits_are_kept_three_times_in_16_bits_and_twice_in_32() -> None:
    model = transformer("llama3-8b")
    work = Workload(1, 1, recompute=Recompute.FULL)
    vocab, hidden = 128256, 4096

    def head(itemsize: int) -> int:
        layer = model.layers[0].activation_bytes(work, itemsize)
        return model.activation_bytes(work, itemsize) - layer - (32 + 2) * hidden * itemsize

    assert head(2) == vocab * (2 + 4 + 4)
    assert head(4) == vocab * (4 + 4)


def test_a_dense_step_takes_6_operations_per_weight_and_12_per_attended_element() -> None:
    model, work = transformer("llama3-8b"), Workload(1, 4096, 3)
    weights = 8_030_261_248 - 128256 * 4096
    assert operations(model, work) == 3 * 4096 * (6 * weights + 12 * 32 * 4096 * 4096)


def test_full_recomputation_takes_8_operations_per_weight_of_a_layer() -> None:
    model, work = transformer("llama3-8b"), Workload(1, 1)
    more = operations(model, replace(work, recompute=Recompute.FULL)) - operations(model, work)
    assert more == 2 * 32 * 218_112_000 + 4 * 32 * 4096


def test_selective_recomputation_repeats_attention_alone() -> None:
    model, work = transformer("llama3-8b"), Workload(1, 1)
    more = operations(model, replace(work, recompute=Recompute.SELECTIVE)) - operations(model, work)
    assert more == 4 * 32 * 4096


def test_only_chosen_experts_compute() -> None:
    model = transformer("mixtral-8x7b")
    active = catalog.architecture(catalog.load("mixtral-8x7b")).num_active_parameters
    work = Workload(1, 1)
    assert operations(model, work) == 6 * (active - 32000 * 4096) + 12 * 32 * 4096


def test_a_tied_embedding_is_an_output_matrix() -> None:
    kinds = transformer("gemma-2-9b").work(1)
    assert kinds["embedding"].matrix == 2 * 256000 * 3584
    assert transformer("llama3-8b").work(1)["embedding"].matrix == 0
