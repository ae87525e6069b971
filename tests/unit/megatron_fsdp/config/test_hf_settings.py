"""FsdpConfig.from_hf: keys and values of transformers and accelerate, and errors."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbuffer import Flat
from megatron_fsdp.config.fsdp_config import FsdpConfig
from megatron_fsdp.config.hf_settings import HfSettings
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.offload import CPUOffloadPolicy

MESH: Any = SimpleNamespace(ndim=1, device_type="cpu", size=lambda axis=None: 2)


def settings(source: Any) -> HfSettings:
    found = FsdpConfig.from_hf(source).hugging_face
    assert found is not None
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"fsdp_version": 2, "fsdp_reshard_after_forward": "TRUE"},
        {"cpu_offload": None, "xla": False, "ignored_modules": None, "activation_checkpointing": "no"},
        {"sharding_strategy": "full_shard"},
        {"sharding_strategy": "1", "version": "1"},
    ],
)
def test_default_settings_change_nothing(given: dict[str, Any]) -> None:
    config = FsdpConfig.from_hf(given)
    assert config.hugging_face == HfSettings()
    assert config.is_zero3
    kwargs = config.fully_shard_kwargs(MESH)
    assert kwargs["reshard_after_forward"] is True
    assert "offload_policy" not in kwargs


@pytest.mark.parametrize(
    ("given", "meant"), [(True, True), ("false", False), ("TRUE", True), (0, False), ("no", False)]
)
def test_truth_values_may_be_words_and_accelerates_spelling_means_the_same(given: Any, meant: bool) -> None:
    for key in ("cpu_offload", "fsdp_offload_params"):
        assert settings({key: given}).cpu_offload is meant
    assert settings({"reshard_after_forward": given}).reshard_after_forward is meant


@pytest.mark.parametrize(
    ("strategy", "number", "flag", "reshards"),
    [
        ("FULL_SHARD", 1, "optim_grads_params", True),
        ("SHARD_GRAD_OP", 2, "optim_grads_params", False),
        ("NO_SHARD", 3, "no_shard", False),
        ("HYBRID_SHARD", 4, "optim_grads_params", True),
        ("HYBRID_SHARD_ZERO2", "5", "optim_grads_params", False),
    ],
)
def test_a_strategy_of_version_1_has_its_meaning(strategy: str, number: Any, flag: str, reshards: bool) -> None:
    for given in ({"reshard_after_forward": strategy.lower()}, {"version": 1, "sharding_strategy": number}):
        config = FsdpConfig.from_hf(given)
        assert config.data_parallel_sharding_strategy == flag
        assert config.hugging_face.sharding_strategy == strategy
        assert config.hugging_face.reshard_after_forward is reshards
        assert (Flat() in config.placements(num_axes=1).parameter) == (flag != "no_shard")
        if strategy.startswith("HYBRID"):
            with pytest.raises(ConfigError, match=r"make a mesh of two axes .* instead of 1"):
                config.fully_shard_kwargs(MESH)


def test_offload_reaches_fully_shard_and_what_acts_is_explained() -> None:
    config = FsdpConfig.from_hf({"cpu_offload": True})
    assert config.fully_shard_kwargs(MESH)["offload_policy"] == CPUOffloadPolicy()
    lines = config.explain().splitlines()
    assert {"cpu_offload True", "reshard_after_forward True", "sharding_strategy FULL_SHARD"} <= set(lines)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("reshard_after_forwrd", "reshard_after_forward"),
        ("fsdp_offload_parms", "fsdp_offload_params"),
        ("min_params", "min_num_params"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(unknown: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{unknown}' in fsdp_config. fix: '{nearest}' is the nearest"):
        FsdpConfig.from_hf({unknown: True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"xla": True}, "xla=True is not supported. .* it is for PyTorch/XLA"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "xla_fsdp_settings=.* it is for PyTorch/XLA"),
        ({"activation_checkpointing_offload": True}, "inputs of checkpointed layers stay on the device"),
        ({"ignored_modules": "head"}, r"ignored_modules='head' .*fully_shard\(ignored_params"),
        ({"fsdp_cpu_ram_efficient_loading": "true"}, r"='true' .* import_safetensors\(model, folder\)"),
        ({"version": 1, "sync_module_states": True}, r"=True .* accelerate_fsdp2\(\)"),
        ({"activation_checkpointing": True}, r"=True .*fix: call model.activation_checkpointing_enable\(\)"),
        ({"cpu_offload": "maybe"}, "cpu_offload: found 'maybe'. fix: give true or false"),
        ({"version": 3}, "version: found 3. fix: give 1 or 2"),
        ({"reshard_after_forward": "HYBRID"}, "found 'HYBRID', wanted one of .*fix: HYBRID_SHARD is the nearest"),
        ({"sharding_strategy": 6}, "sharding_strategy: found 6, wanted one of FULL_SHARD"),
        ({"sharding_strategy": True}, "sharding_strategy: found True, wanted one of FULL_SHARD"),
        ({"version": 2, "reshard_after_forward": "FULL_SHARD"}, "version 2 contradicts sharding strategy FULL_SHARD"),
        ({"version": 1, "reshard_after_forward": True}, "version 1 contradicts reshard_after_forward True"),
        ({"version": 2, "sharding_strategy": "FULL_SHARD"}, "version 2 contradicts sharding strategy FULL_SHARD"),
        (
            {"sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"},
            "sharding_strategy NO_SHARD contradicts reshard_after_forward FULL_SHARD",
        ),
        ({"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, "cpu_offload contradicts NO_SHARD"),
        ({"cpu_offload": True, "fsdp_offload_params": True}, "'fsdp_offload_params' is given twice"),
        (
            {"distributed_type": "MULTI_GPU", "fsdp_config": {}},
            "distributed_type: found 'MULTI_GPU'.*fix: distributed_type: FSDP",
        ),
        (
            {"mixed_precision": "fp8", "fsdp_config": {}},
            "mixed_precision: found 'fp8'. fix: give one of no, fp32, bf16",
        ),
        ({"fsdp_config": ["version"]}, "fsdp_config: found .* give a mapping of keys"),
    ],
)
def test_unsupported_unreadable_or_contradictory_settings_are_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FsdpConfig.from_hf(given)


ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": False,
    },
}


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_accelerate_s_file_is_read(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"default_config.{suffix}"
    # Every JSON document is also a YAML document.
    path.write_text(json.dumps(ACCELERATE))
    if importlib.util.find_spec("yaml") is None:
        monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=json.loads, YAMLError=ValueError))
    config = FsdpConfig.from_hf(path)
    assert config.mixed_precision_policy().param_dtype is torch.bfloat16
    assert not config.hugging_face.reshard_after_forward
    assert config == FsdpConfig.from_hf(str(path)) == FsdpConfig.from_hf(ACCELERATE)


def test_a_yaml_file_without_pyyaml_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(json.dumps(ACCELERATE))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"PyYAML. fix: pip install pyyaml, or write the section fsdp_config as JSON"):
        FsdpConfig.from_hf(path)


def test_mixed_precision_that_yaml_reads_as_a_truth_value_means_none() -> None:
    assert FsdpConfig.from_hf({"mixed_precision": False, "fsdp_config": None}) == FsdpConfig.from_hf({})
    assert FsdpConfig.from_hf({"mixed_precision": "fp16", "fsdp_config": {}}).fp16


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[1]", "holds a list. fix: write a mapping")])
def test_a_damaged_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"fsdp\.json {message}"):
        FsdpConfig.from_hf(path)
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read"):
        FsdpConfig.from_hf(tmp_path / "missing.json")


def test_keys_without_effect_are_noticed() -> None:
    found = FsdpConfig.from_hf({"use_orig_params": False, "transformer_layer_cls_to_wrap": "Block"}).notices()
    called, names = sorted(found)
    assert called.startswith("transformer_layer_cls_to_wrap does nothing here: units are the modules that fully_shard")
    assert names == "use_orig_params does nothing here: parameters always keep their names and shapes"
    assert FsdpConfig.from_hf({}).notices() == ()
