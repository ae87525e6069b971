"""Name maps: patterns and errors."""

from pathlib import Path

import pytest

from megatron_fsdp import ConfigError
from megatron_fsdp.checkpoint.safetensors_model import NameMap

MAP = NameMap(
    {"blocks.*.query.*": "model.layers.*.self_attn.q_proj.*", "embedding.weight": "model.embed_tokens.weight"}
)


def test_a_star_stands_for_the_same_text_on_both_sides_in_order() -> None:
    assert MAP.translate(["blocks.11.query.weight", "embedding.weight", "head.weight"]) == {
        "blocks.11.query.weight": "model.layers.11.self_attn.q_proj.weight",
        "embedding.weight": "model.embed_tokens.weight",
        "head.weight": "head.weight",
    }


@pytest.mark.parametrize("name", ["blocks.1.inner.query.weight", "embeddingxweight"])
def test_a_star_does_not_reach_over_a_dot_and_a_dot_is_one(name: str) -> None:
    assert MAP.translate([name]) == {name: name}


def test_two_names_that_would_become_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' and 'b' both become 'c'"):
        NameMap({"a": "c", "b": "c"}).translate(["a", "b"])


def test_different_numbers_of_stars_are_refused() -> None:
    with pytest.raises(ConfigError, match="different numbers of"):
        NameMap({"blocks.*": "layers"})


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}'])
def test_a_file_without_one_object_of_strings_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "map.json").write_text(content)
    with pytest.raises(ConfigError, match=r"map\.json"):
        NameMap.from_json(tmp_path / "map.json")
