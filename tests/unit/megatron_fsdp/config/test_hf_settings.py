"""FsdpConfig.from_hf: keys and values as transformers and accelerate have them, and what is refused."""

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
from megatron_fsdp.config.hf_keys import KEYS, Key
from megatron_fsdp.config.hf_settings import HfSettings
from megatron_fsdp.errors import ConfigError
from megatron_fsdp.policy.offload import CPUOffloadPolicy

MESH: Any = SimpleNamespace(ndim=1, device_type="cpu", size=lambda axis=None: 2)


def settings(source: Any) -> HfSettings:
    found = FsdpConfig.from_hf(source).hugging_face
    assert found is not None
    return found


def test_no_keys_give_transformers_defaults() -> None:
    config = FsdpConfig.from_hf({})
    assert config.hugging_face == HfSettings()
    assert config.is_zero3
    assert config.fully_shard_kwargs(MESH)["reshard_after_forward"] is True


@pytest.mark.parametrize("key", [key for key in KEYS if key.default is not None], ids=lambda key: key.name)
def test_a_key_s_default_given_changes_nothing(key: Key) -> None:
    assert settings({key.name: key.default}) == HfSettings(given=(key.name,))


def test_keys_are_understood_with_and_without_their_prefix() -> None:
    plain = {"version": 2, "reshard_after_forward": False, "transformer_layer_cls_to_wrap": "Block,Layer"}
    assert settings(plain) == settings({f"fsdp_{name}": value for name, value in plain.items()})
    assert settings(plain).transformer_layer_cls_to_wrap == ("Block", "Layer")


def test_each_project_s_own_names_mean_the_same() -> None:
    assert settings({"cpu_offload": True}) == settings({"fsdp_offload_params": "true"})
    assert settings({"transformer_layer_cls_to_wrap": ["Block"]}) == settings(
        {"transformer_cls_names_to_wrap": ["Block"]}
    )


@pytest.mark.parametrize(
    ("given", "meant"), [(True, True), ("false", False), ("TRUE", True), (0, False), ("no", False)]
)
def test_truth_values_may_be_words(given: Any, meant: bool) -> None:
    assert settings({"cpu_offload": given}).cpu_offload is meant


def test_a_null_counts_as_not_given() -> None:
    assert settings({"min_num_params": None, "ignored_modules": None}) == HfSettings()


def test_choices_may_be_in_any_case() -> None:
    assert settings({"auto_wrap_policy": "no_wrap"}).auto_wrap_policy == "NO_WRAP"


@pytest.mark.parametrize(
    ("strategy", "flag", "reshards"),
    [
        ("FULL_SHARD", "optim_grads_params", True),
        ("SHARD_GRAD_OP", "optim_grads_params", False),
        ("NO_SHARD", "no_shard", False),
        ("HYBRID_SHARD", "optim_grads_params", True),
        ("HYBRID_SHARD_ZERO2", "optim_grads_params", False),
    ],
)
def test_a_strategy_of_version_1_has_its_meaning(strategy: str, flag: str, reshards: bool) -> None:
    for key in ("reshard_after_forward", "sharding_strategy"):
        config = FsdpConfig.from_hf({"version": 1, key: strategy.lower()})
        assert config.data_parallel_sharding_strategy == flag
        assert config.hugging_face.reshard_after_forward is reshards
        if strategy.startswith("HYBRID"):
            with pytest.raises(ConfigError, match=r"wanted a mesh of two axes .* found 1"):
                config.fully_shard_kwargs(MESH)


def test_a_strategy_may_be_given_by_its_number() -> None:
    assert settings({"sharding_strategy": 2}).sharding_strategy == "SHARD_GRAD_OP"
    assert settings({"sharding_strategy": "3"}).sharding_strategy == "NO_SHARD"


def test_a_strategy_s_name_without_a_version_means_version_1() -> None:
    assert settings({"fsdp_sharding_strategy": "FULL_SHARD"}).version == 1
    assert settings({"reshard_after_forward": "SHARD_GRAD_OP"}).version == 1
    assert settings({"reshard_after_forward": "false"}).version == 2


def test_the_strategy_reaches_the_placements_and_offload_reaches_fully_shard() -> None:
    assert Flat() not in FsdpConfig.from_hf({"sharding_strategy": "NO_SHARD"}).placements(num_axes=1).parameter
    kwargs = FsdpConfig.from_hf({"cpu_offload": True}).fully_shard_kwargs(MESH)
    assert kwargs["offload_policy"] == CPUOffloadPolicy()
    assert "offload_policy" not in FsdpConfig.from_hf({}).fully_shard_kwargs(MESH)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("reshard_after_forwrd", "reshard_after_forward"),
        ("fsdp_offload_parms", "fsdp_offload_params"),
        ("mixed_precision_policy", "auto_wrap_policy"),
        ("min_params", "min_num_params"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(unknown: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown key '{unknown}' in fsdp_config, the nearest valid one is '{nearest}'"
    ):
        FsdpConfig.from_hf({unknown: True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"xla": True}, "xla=True: it is for PyTorch/XLA"),
        ({"xla_fsdp_v2": "true"}, "xla_fsdp_v2=True: it is for PyTorch/XLA"),
        ({"xla_fsdp_grad_ckpt": True}, "xla_fsdp_grad_ckpt=True: it is for PyTorch/XLA"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "xla_fsdp_settings=.*: it is for PyTorch/XLA"),
        ({"activation_checkpointing_offload": True}, "inputs of checkpointed layers stay on the device"),
        ({"cpu_offload": "maybe"}, "cpu_offload: found 'maybe', wanted true or false"),
        ({"min_num_params": -1}, "min_num_params: found -1, wanted a whole number >= 0"),
        ({"min_num_params": True}, "min_num_params: found True, wanted a whole number >= 0"),
        ({"version": 3}, "version: found 3, wanted one of 1, 2"),
        ({"auto_wrap_policy": "SIZE_WRAP"}, "found 'SIZE_WRAP', wanted one of .*; the nearest is SIZE_BASED_WRAP"),
        ({"reshard_after_forward": "HYBRID"}, "found 'HYBRID', wanted one of .*; the nearest is HYBRID_SHARD"),
        ({"sharding_strategy": 6}, "sharding_strategy: found 6, wanted one of FULL_SHARD"),
        ({"ignored_modules": "head"}, r"ignored_modules='head': .*fully_shard\(ignored_params"),
        ({"cpu_ram_efficient_loading": True}, r"=True: .* import_safetensors\(model, folder\)"),
        ({"version": 1, "sync_module_states": True}, r"=True: .* accelerate_fsdp2\(\)"),
        ({"activation_checkpointing": True}, r"=True: call model.activation_checkpointing_enable\(\)"),
        (
            {"version": 2, "reshard_after_forward": "FULL_SHARD"},
            "version 2 contradicts reshard_after_forward FULL_SHARD",
        ),
        ({"version": 1, "reshard_after_forward": True}, "version 1 contradicts reshard_after_forward True"),
        ({"version": 2, "sharding_strategy": "FULL_SHARD"}, "version 2 contradicts sharding_strategy FULL_SHARD"),
        (
            {"sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"},
            "sharding_strategy NO_SHARD contradicts reshard_after_forward FULL_SHARD",
        ),
        ({"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, "cpu_offload contradicts NO_SHARD"),
        ({"min_num_params": 5}, "min_num_params 5 contradicts auto_wrap_policy TRANSFORMER_BASED_WRAP"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "SIZE_BASED_WRAP needs min_num_params > 0"),
        (
            {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": ["Block"]},
            "transformer_layer_cls_to_wrap contradicts auto_wrap_policy NO_WRAP",
        ),
        (
            {"cpu_offload": True, "fsdp_offload_params": True},
            "'cpu_offload' and 'fsdp_offload_params' are the same key",
        ),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {}}, "distributed_type: found 'MULTI_GPU', wanted 'FSDP'"),
        (
            {"mixed_precision": "fp8", "fsdp_config": {}},
            "mixed_precision: found 'fp8', wanted one of no, fp32, bf16, fp16",
        ),
        ({"fsdp_config": ["version"]}, "fsdp_config: found .* wanted a mapping of keys"),
        ({"state_dict_type": "local_state_dict"}, r"state_dict_type=LOCAL_STATE_DICT: .*; give SHARDED_STATE_DICT"),
    ],
)
def test_what_cannot_be_done_or_read_or_contradicts_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FsdpConfig.from_hf(given)


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def parse(text: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for line in text.strip().splitlines():
        name, _, value = line.partition(":")
        if not value:
            content[name] = {}
        elif line.startswith("  "):
            content["fsdp_config"][name.strip()] = value.strip()
        else:
            content[name] = value.strip()
    return content


def test_a_json_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"transformer_layer_cls_to_wrap": ["Block"]}))
    assert settings(path).transformer_layer_cls_to_wrap == ("Block",)
    assert settings(str(path)) == settings(path)


def test_accelerate_s_yaml_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(ACCELERATE)
    # PyYAML where it is installed; where it is not, what it would return of this file.
    if importlib.util.find_spec("yaml") is None:
        monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=parse, YAMLError=ValueError))
    config = FsdpConfig.from_hf(path)
    assert config.mixed_precision_policy().param_dtype is torch.bfloat16
    assert config.hugging_face.transformer_layer_cls_to_wrap == ("LlamaDecoderLayer",)
    assert not config.hugging_face.reshard_after_forward
    assert config == FsdpConfig.from_hf(parse(ACCELERATE))


def test_a_yaml_file_without_pyyaml_is_refused_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(ACCELERATE)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        ConfigError, match=r"needs PyYAML: pip install pyyaml, or write the section fsdp_config as JSON"
    ):
        FsdpConfig.from_hf(path)


def test_mixed_precision_that_yaml_reads_as_a_truth_value_means_none() -> None:
    assert FsdpConfig.from_hf({"mixed_precision": False, "fsdp_config": None}) == FsdpConfig.from_hf({})
    assert FsdpConfig.from_hf({"mixed_precision": "fp16", "fsdp_config": {}}).fp16


@pytest.mark.parametrize(("text", "message"), [("{", "cannot be read"), ("[1]", "holds a list; wanted a mapping")])
def test_a_damaged_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "fsdp.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"fsdp\.json {message}"):
        FsdpConfig.from_hf(path)
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read"):
        FsdpConfig.from_hf(tmp_path / "missing.json")


@pytest.mark.parametrize("name", ["forward_prefetch", "backward_prefetch", "use_orig_params", "limit_all_gathers"])
def test_a_silent_key_is_noticed(name: str) -> None:
    value = "BACKWARD_POST" if name == "backward_prefetch" else False
    (notice,) = FsdpConfig.from_hf({name: value}).notices()
    assert notice.startswith(f"{name} does nothing here; always so: ")
    (notice,) = FsdpConfig.from_hf({"transformer_layer_cls_to_wrap": "Block"}).notices()
    assert "units are the modules that fully_shard is called on" in notice
    assert FsdpConfig.from_hf({}).notices() == ()


def test_a_name_of_earlier_releases_is_understood_and_said_to_be_one() -> None:
    config = FsdpConfig.from_hf({"fsdp_config": {"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}})
    older, silent = config.notices()
    assert older == "fsdp_backward_prefetch_policy is an older name, which is deprecated; write backward_prefetch"
    assert silent.startswith("backward_prefetch does nothing here; always so: ")
    with pytest.raises(ConfigError, match="'backward_prefetch' and 'backward_prefetch_policy' are the same key"):
        FsdpConfig.from_hf({"backward_prefetch": "BACKWARD_PRE", "backward_prefetch_policy": "BACKWARD_PRE"})


def test_every_key_that_acts_is_explained() -> None:
    lines = FsdpConfig.from_hf({"cpu_offload": True}).explain().splitlines()
    for key in KEYS:
        assert any(line.startswith(f"{key.name} ") for line in lines) is not key.is_silent
    assert "cpu_offload True: the same" in lines
    assert any(line.startswith("reshard_after_forward True (default): ") for line in lines)


def test_spellings_are_unique_and_every_key_that_acts_has_a_setting() -> None:
    spellings = [spelling for key in KEYS for spelling in (key.name, *key.others, *key.older)]
    assert len(set(spellings)) == len(spellings)
    assert {key.name for key in KEYS if not key.is_silent} <= set(HfSettings.__dataclass_fields__)
