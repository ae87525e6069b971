"""A checkpoint of any layout loads into any other, PyTorch's own included, with every bit of weights and optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_fsdp import AdamW, MixedPrecisionPolicy, load_checkpoint, save_checkpoint
from tests.functional.checkpoint_cases import LAYOUTS, Layout, State, full_optimizer_state, train_alone
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import make_model
from tests.harness.oracle import differing, train, whole_state


def save_after_two_steps(layout: Layout, path: str) -> tuple[State, State]:
    model, optimizer = layout.build(seed=0)
    train_alone(model, optimizer, range(2))
    save_checkpoint(model, optimizer, path, extra={"layout": path})
    return whole_state(model), full_optimizer_state(model, optimizer)


Saved = dict[str, tuple[str, State, State]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save a checkpoint of every layout; return their contents."""
    root = tmp_path_factory.mktemp("layouts")
    found = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        path = str(root / str(number))
        found[name] = (path, *run_ranks(layout.num_ranks, save_after_two_steps, layout, path)[0])
    return found


def load_each(layout: Layout, saved: Saved) -> dict[str, list[str]]:
    """Load every checkpoint into one model of this layout that is in use; list unequal values by saver."""
    model, optimizer = layout.build(seed=1)
    train_alone(model, optimizer, range(1))
    wrong = {}
    for name, (path, wanted, wanted_optimizer) in saved.items():
        extra = load_checkpoint(model, optimizer, path)
        wrong[name] = differing(whole_state(model), wanted)
        wrong[name] += differing(full_optimizer_state(model, optimizer), wanted_optimizer)
        if [group["weight_decay"] for group in optimizer.param_groups] != [0.1, 0.0]:
            wrong[name].append("weight decay")
        if {group["lr"] for group in optimizer.param_groups} != {0.01} or extra != {"layout": path}:
            wrong[name].append("learning rate or extra")
    return {name: found for name, found in wrong.items() if found}


LOADED = [(name, part) for name in LAYOUTS for part in range(3)]


@pytest.mark.parametrize(("name", "part"), nightly_but(LOADED[::9], LOADED))
def test_every_layouts_checkpoint_loads_bit_for_bit_on(name: str, part: int, saved: Saved) -> None:
    layout, number = LAYOUTS[name], list(LAYOUTS).index(name)
    third = {saver: found for position, (saver, found) in enumerate(saved.items()) if (position + number) % 3 == part}
    assert run_ranks(layout.num_ranks, load_each, layout, third) == [{}] * layout.num_ranks


def load_and_step(layout: Layout, path: str, num_savers: int) -> State:
    model, optimizer = layout.build(seed=1)
    load_checkpoint(model, optimizer, path)
    train(model, optimizer, range(2, 3), range(num_savers))
    return whole_state(model)


@pytest.mark.parametrize(("saver", "loader"), [("3 ranks", "HFSDP, blocks of 5 rows"), ("HSDP", "FSDP2")])
def test_training_goes_on_in_another_layout_as_in_one_process(saver: str, loader: str, saved: Saved) -> None:
    num_savers = LAYOUTS[saver].num_ranks
    model, optimizer = Layout(engine="plain").build(seed=0)
    train(model, optimizer, range(3), range(num_savers))
    for found in run_ranks(LAYOUTS[loader].num_ranks, load_and_step, LAYOUTS[loader], saved[saver][0], num_savers):
        assert differing(found, model.state_dict(), 1e-5) == []


# ---------------------------------------------------------------------- PyTorch's own tools


def load_with_pytorch(layout: Layout, path: str) -> tuple[State, State]:
    model, optimizer = layout.build(seed=1)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return whole_state(model), full_optimizer_state(model, optimizer)


def test_pytorchs_own_loader_fills_an_fsdp2_model_from_our_checkpoint(saved: Saved) -> None:
    path, wanted, wanted_optimizer = saved["HSDP"]
    for weights, moments in run_ranks(3, load_with_pytorch, LAYOUTS["FSDP2"], path):
        assert differing(weights, wanted) == []
        assert differing(moments, wanted_optimizer) == []


def save_with_pytorch(layout: Layout, path: str) -> tuple[State, State]:
    model, optimizer = layout.build(seed=0)
    train_alone(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=path)
    return whole_state(model), full_optimizer_state(model, optimizer)


def load_one(layout: Layout, path: str) -> tuple[State, State]:
    model, optimizer = layout.build(seed=1)
    assert load_checkpoint(model, optimizer, path) == {}
    return whole_state(model), full_optimizer_state(model, optimizer)


def test_a_folder_that_pytorch_wrote_from_fsdp2_loads_on_our_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    wanted, wanted_optimizer = run_ranks(3, save_with_pytorch, LAYOUTS["FSDP2"], path)[0]
    for weights, moments in run_ranks(4, load_one, LAYOUTS["HSDP"], path):
        assert differing(weights, wanted) == []
        assert differing(moments, wanted_optimizer) == []


def test_pytorchs_converters_take_our_checkpoint_to_one_file_and_back(saved: Saved, tmp_path: Path) -> None:
    path, wanted, wanted_optimizer = saved["3 ranks"]
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    document = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert differing(document["model"], wanted) == []
    assert [group["weight_decay"] for group in document["optimizer"]["param_groups"]] == [0.1, 0.0]
    torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "back")
    for weights, moments in run_ranks(2, load_one, LAYOUTS["ZeRO-0"], str(tmp_path / "back")):
        assert differing(weights, wanted) == []
        assert differing(moments, wanted_optimizer) == []


@on_ranks(2)
def test_moments_wider_than_the_weights_lose_nothing_on_the_way(tmp_path: Path) -> None:
    """Save FP32 moments of bf16 weights; load them into a fresh optimizer by both ways."""
    path = str(tmp_path / "step")
    layout = Layout((2,), policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model = layout.place(make_model(0).to(torch.bfloat16))
    optimizers = [AdamW(model.parameters(), lr=0.01, moments_dtype=torch.float32) for _ in range(3)]
    train_alone(model, optimizers[0], range(2))
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    save_checkpoint(model, optimizers[0], path)
    load_checkpoint(model, optimizers[2], path)
    wanted, *found = (full_optimizer_state(model, optimizer) for optimizer in optimizers)
    dtypes = {value.dtype for name, value in wanted.items() if name.endswith("exp_avg")}
    assert (differing(found[0], wanted), differing(found[1], wanted), dtypes) == ([], [], {torch.float32})
