"""Checkpoints in the layouts of NVIDIA's Megatron-FSDP: read with ``load_checkpoint``, exchanged through Megatron's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megatron_fsdp import CheckpointError, fully_shard_model, fully_shard_optimizer, load_checkpoint
from megatron_fsdp.__main__ import main
from megatron_fsdp.checkpoint.api import load_matching
from megatron_fsdp.integrations.megatron.checkpoint import (
    check_was_read,
    describe_by_name,
    lay_out_for_megatron,
    load_by_name,
)
from tests.functional.checkpoint_cases import message_of
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.oracle import differing, train

State = dict[str, torch.Tensor]
WIDTH, HIDDEN = 5, 6


class Linear(nn.Linear):
    def get_extra_state(self) -> None:
        """Return nothing, like TransformerEngine's layers, which also have such an entry."""

    def set_extra_state(self, state: Any) -> None:
        assert state is None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = Linear(WIDTH, 2 * HIDDEN), Linear(HIDDEN, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(inputs).chunk(2, dim=-1)
        return self.linear_fc2(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.mlp(self.norm(inputs))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs * self.scale


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    # Megatron leaves out parameters that have no element on this rank, and groups that are empty then.
    groups: list[dict[str, Any]] = [
        {"params": matrices, "wd_mult": 1.0},
        {"params": others, "wd_mult": 0.0, "weight_decay": 0.0},
    ]
    held = [{**group, "params": [p for p in group["params"] if is_held(p)]} for group in groups]
    return [group for group in held if group["params"]]


def is_held(parameter: Any) -> bool:
    return bool(getattr(parameter, "_local_tensor", parameter).numel())


def build(seed: int, is_sharded: bool = True, strategy: str = "optim_grads_params") -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = Decoder()
    if is_sharded:
        model = fully_shard_model(model, [Layer], strategy)
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.01 / (seed + 1))
    return model, fully_shard_optimizer(optimizer) if is_sharded else optimizer


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(100 * rank + step)
    return model(torch.randn(3, WIDTH)).square().mean()


def weights_of(model: nn.Module) -> State:
    state = {name: value.detach() for name, value in model.state_dict().items() if value is not None}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()
    }


def moments_of(model: nn.Module, optimizer: Any) -> State:
    return {
        f"{name}.{key}": getattr(value, "_local_tensor", value).clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_as_megatron(model: Any, optimizer: Any, path: str, is_gated: bool) -> None:
    state = {"model": model.state_dict(), "optimizer": describe_by_name([model], optimizer, is_loading=False)}
    save(lay_out_for_megatron(state, model, is_gated=is_gated), checkpoint_id=path)


def load_as_megatron(model: Any, optimizer: Any, path: str, is_gated: bool, strict: bool = True) -> None:
    """Load as megatron/training/checkpointing.py does, which skips values that the checkpoint lacks."""
    state = {"model": model.state_dict(), "optimizer": describe_by_name([model], optimizer, is_loading=True)}
    laid_out = lay_out_for_megatron(state, model, is_gated=is_gated)
    load(laid_out, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    check_was_read(model, strict=strict)
    model.load_state_dict(state["model"])
    load_by_name([model], optimizer, state["optimizer"])
    model.install_optimized_model_weights()


def resume(path: str, strategy: str) -> tuple[list[str], list[str], int]:
    model, optimizer = build(0, strategy=strategy)
    train(model, optimizer, range(2), loss=loss)
    save_as_megatron(model, optimizer, path, is_gated=True)
    other, other_optimizer = build(1, strategy=strategy)
    load_as_megatron(other, other_optimizer, path, is_gated=True)
    found = differing(moments_of(other, other_optimizer), moments_of(model, optimizer))
    found += [] if other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] else ["lr"]
    train(model, optimizer, range(2, 4), loss=loss)
    train(other, other_optimizer, range(2, 4), loss=loss)
    alone, alone_optimizer = build(0, is_sharded=False)
    train(alone, alone_optimizer, range(4), loss=loss)
    wanted = weights_of(model)
    found += differing(weights_of(other), wanted)
    return found, differing(wanted, weights_of(alone), 1e-5), len(optimizer.param_groups)


@pytest.mark.parametrize("strategy", nightly_but(["optim"], ["optim_grads_params", "optim"]))
def test_a_run_resumes_to_the_bit_if_ranks_omit_their_empty_parameters(strategy: str, tmp_path: Path) -> None:
    found = run_ranks(4, resume, str(tmp_path / "step"), strategy)
    for differences, from_alone, _ in found:
        assert differences == []
        assert from_alone == []
    # Some ranks have no parameter group of vectors.
    assert {num_groups for *_, num_groups in found} == {1, 2}


def save_only(path: str, is_gated: bool) -> State:
    model, optimizer = build(0)
    train(model, optimizer, range(2), [0], loss=loss)
    save_as_megatron(model, optimizer, path, is_gated)
    return weights_of(model)


def load_only(path: str, is_gated: bool) -> tuple[State, str]:
    model, optimizer = build(1)
    message = message_of(CheckpointError, lambda: load_as_megatron(model, optimizer, path, is_gated))
    return weights_of(model), message


def test_entries_are_named_as_in_megatron_fsdp_and_load_on_other_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    wanted = run_ranks(2, save_only, path, True)[0]
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    fc1 = "layers.0.mlp.linear_fc1.weight"
    assert tuple(entries[f"model.module.{fc1}_w"].size) == tuple(entries[f"model.module.{fc1}_v"].size) == (6, 5)
    assert tuple(entries[f"optimizer.state.module.module.{fc1}_v.exp_avg"].size) == (6, 5)
    assert f"optimizer.param_to_group_meta.module.module.{fc1}.lr" in entries
    assert not [name for name in entries if name.endswith("_extra_state")]
    for loaded, message in run_ranks(3, load_only, path, True):
        assert message == "no error"
        assert differing(loaded, wanted) == []


def test_weights_that_megatrons_loader_passes_over_are_an_error_with_their_names(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    run_ranks(2, save_only, path, True)
    for _, message in run_ranks(2, load_only, path, False):
        assert "the checkpoint has no module.layers.0.mlp.linear_fc1.weight, " in message
        assert "megatron_fsdp.load_checkpoint" in message


@on_ranks(2)
def test_optimizer_state_that_nothing_was_read_into_is_an_error() -> None:
    model, optimizer = build(0)
    state = describe_by_name([model], optimizer, is_loading=True)
    message = message_of(CheckpointError, lambda: load_by_name([model], optimizer, state))
    assert "nothing was read into the optimizer's state of module.module.layers." in message


def split(values: Mapping[str, Any], is_gated: bool) -> dict[str, Any]:
    """Cut gated weights and their moments into halves, as ``handle_swiglu_in_state_dict`` does."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not (is_gated and ".linear_fc1." in name):
            found[name] = value
        elif isinstance(value, dict):
            halves = {key: one.chunk(2) if one.ndim else (one, one) for key, one in value.items()}
            found |= {f"{name}_{half}": {key: one[i] for key, one in halves.items()} for i, half in enumerate("wv")}
        else:
            found |= dict(zip((f"{name}_w", f"{name}_v"), value.chunk(2), strict=True))
    return found


def theirs(layout: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a whole model's state as NVIDIA's package hands it to ``dcp.save``.

    Args:
        layout: "recipe": of its README. "megatron": of Megatron's training scripts. "apex": the same, with an Adam that
            counts steps by group. "version 2": ``get_optimizer_state_dict``'s names, extra state in between.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {name: value for name, value in model.state_dict().items() if value is not None}
    document = optimizer.state_dict()
    live = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if layout == "recipe":
        return {"model": {f"module.{name}": value for name, value in weights.items()}, "optimizer": document}
    state = {names[id(live[index])]: dict(values) for index, values in document["state"].items()}
    if layout == "version 2":
        groups = [
            {**group, "params": [names[id(live[index])] for index in group["params"]]}
            for group in document["param_groups"]
        ]
        return {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}
    meta: dict[str, Any] = {}
    for group in document["param_groups"]:
        values = {key: value for key, value in group.items() if key != "params"}
        if layout == "apex":
            values = {key: values[key] for key in ("lr", "betas", "eps", "weight_decay", "wd_mult")}
            values |= {"bias_correction": True, "step": 2}
        meta |= {f"module.module.module.{names[id(live[index])]}": dict(values) for index in group["params"]}
    if layout == "apex":
        state = {name: {key: one for key, one in values.items() if key != "step"} for name, values in state.items()}
    return {
        "model": split({f"module.{name}": value for name, value in weights.items()}, is_gated=True),
        "optimizer": {
            "state": split({f"module.module.module.{name}": values for name, values in state.items()}, is_gated=True),
            "param_to_group_meta": meta,
        },
        "iteration": 2,
        "rng_state": {"(0, 0)": [1, 2]},
    }


def write_theirs(layout: str, path: str) -> State:
    model, optimizer = build(0, is_sharded=False)
    train(model, optimizer, range(2), [0, 1], loss=loss)
    save(theirs(layout, model, optimizer), checkpoint_id=path)
    train(model, optimizer, range(2, 4), [0, 1], loss=loss)
    return weights_of(model)


def read_theirs(path: str) -> State:
    torch.manual_seed(1)
    model: Any = fully_shard_model(Decoder(), [Layer])
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "wd_mult": 5.0}, {"params": others, "wd_mult": 7.0}]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(groups, lr=5.0))
    load_checkpoint(model, optimizer, path)
    train(model, optimizer, range(2, 4), loss=loss)
    return weights_of(model)


@pytest.mark.parametrize("layout", ["recipe", "megatron", "apex", "version 2"])
def test_training_goes_on_from_nvidias_checkpoint(layout: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    (wanted,) = run_ranks(1, write_theirs, layout, path)
    for found in run_ranks(2, read_theirs, path):
        assert differing(found, wanted, 1e-6) == []


class Wider(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].norm = nn.LayerNorm(WIDTH, bias=False)
        self.layers.append(nn.Linear(WIDTH, WIDTH, bias=False))


def refuse_theirs(path: str) -> tuple[str, str]:
    model = fully_shard_model(Wider(), [Layer])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    message = message_of(CheckpointError, lambda: load_checkpoint(model, optimizer, path))
    load_matching(model, path)
    shuffled = fully_shard_model(Decoder(), [Layer])
    optimizer = torch.optim.AdamW(reversed(list(shuffled.parameters())), lr=5.0)
    return message, message_of(CheckpointError, lambda: load_checkpoint(shuffled, optimizer, path))


def test_state_by_position_is_refused_where_a_shape_differs(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    run_ranks(1, write_theirs, "recipe", path)
    for other_model, other_order in run_ranks(2, refuse_theirs, path):
        assert "layers.0.norm.bias: only in the checkpoint" in other_model
        assert "layers.2.weight: not in the checkpoint" in other_model
        assert "of another optimizer; nothing was loaded" in other_order
        assert "exp_avg: (12, 5) in the checkpoint, (5,) here" in other_order


def test_the_command_exports_what_megatrons_scripts_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "step")
    wanted = run_ranks(2, save_only, path, False)[0]
    assert main(["checkpoint", "export", path, str(tmp_path / "out")]) == 0
    assert f"{len(wanted)} tensors" in capsys.readouterr().out
    assert differing(load_file(tmp_path / "out" / "model.safetensors"), wanted) == []


def save_with_extra_state(path: str) -> None:
    model = Decoder()
    save({"model": model.state_dict()}, checkpoint_id=path)


def test_the_command_exports_a_checkpoint_with_empty_extra_state(tmp_path: Path) -> None:
    run_ranks(1, save_with_extra_state, str(tmp_path / "step"))
    assert main(["checkpoint", "export", str(tmp_path / "step"), str(tmp_path / "out")]) == 0
    assert main(["checkpoint", "inspect", str(tmp_path / "step")]) == 0
