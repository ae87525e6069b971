"""save_checkpoint and load_checkpoint: exact resume, other numbers of ranks, and refusals that change nothing."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from megatron_fsdp import CheckpointError, MixedPrecisionPolicy, load_checkpoint, save_checkpoint
from tests.harness import run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import VOCABULARY, WIDTH, Model, draw_tokens, loss_of, make_mesh, make_model, world_mesh
from tests.harness.oracle import differing, shard_model, train, whole_state

State = dict[str, torch.Tensor]
EXTRA = {"iteration": 2, "rates": [0.1, 0.2], "data": {"position": 17, "order": torch.arange(5)}, "note": "half way"}
NUM_SAVERS = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """A sharded model and its optimizer, to be built anew on the ranks."""

    strategy: str = "optim_grads_params"
    mesh_shape: tuple[int, ...] = (NUM_SAVERS,)
    optimizer: str = "AdamW"
    policy: MixedPrecisionPolicy | None = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the mesh has."""
        return torch.Size(self.mesh_shape).numel()

    def build(self, seed: int) -> tuple[Model, torch.optim.Optimizer]:
        """Build both; the seed decides the weights and, as it is used for no other, the learning rate."""
        model = shard_model(make_model(seed), make_mesh(self.mesh_shape), self.strategy, self.policy)
        return model, make_optimizer(self.optimizer, model, lr=0.01 / (seed + 1))


def make_optimizer(name: str, model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    """Make an optimizer of torch.optim, with momentum where it is SGD."""
    options = {"momentum": 0.9} if name == "SGD" else {"weight_decay": 0.1}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr, **options)
    return optimizer


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's state as whole tensors in one flat dictionary."""
    options = StateDictOptions(full_state_dict=True)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    return {f"{name}: {key}": value for name, values in state.items() for key, value in values.items()}


# ---------------------------------------------------------------------- resume


def resume_beside(setup: Setup, path: str) -> list[str]:
    """Save after two steps, load into a new model, train both on, and list what is not bit for bit the same."""
    mine = [dist.get_rank()]
    model, optimizer = setup.build(seed=0)
    train(model, optimizer, range(2), mine)
    save_checkpoint(model, optimizer, path, extra=EXTRA)
    drawn = torch.rand(3)
    other, other_optimizer = setup.build(seed=1)
    extra = load_checkpoint(other, other_optimizer, path)
    redrawn = torch.rand(3)
    train(model, optimizer, range(2, 5), mine)
    train(other, other_optimizer, range(2, 5), mine)
    found = differing(whole_state(other), whole_state(model))
    found += differing(optimizer_state(other, other_optimizer), optimizer_state(model, optimizer))
    if not torch.equal(drawn, redrawn):
        found.append("random numbers")
    if other_optimizer.param_groups[0]["lr"] != 0.01:
        found.append("learning rate")
    if str(extra) != str(EXTRA):
        found.append("extra")
    return found


SETUPS = {
    "parameters sharded": Setup(),
    "optimizer state sharded": Setup("optim", (2,)),
    "nothing sharded": Setup("no_shard", (2,)),
    "two axes": Setup("hsdp", (2, 2)),
    "two sharded axes": Setup("hfsdp", (2, 2)),
    "SGD with momentum": Setup(mesh_shape=(2,), optimizer="SGD"),
    "bf16 compute": Setup(mesh_shape=(2,), policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", nightly_but(["nothing sharded", "two sharded axes", "bf16 compute"], SETUPS))
def test_training_resumes_bit_for_bit_with(name: str, tmp_path: Path) -> None:
    setup = SETUPS[name]
    assert run_ranks(setup.num_ranks, resume_beside, setup, str(tmp_path / "step-2")) == [[]] * setup.num_ranks


def save_after_two_steps(path: str, has_optimizer: bool = True) -> State:
    model, optimizer = Setup().build(seed=0)
    train(model, optimizer, range(2), [dist.get_rank()])
    save_checkpoint(model, optimizer if has_optimizer else None, path, extra=EXTRA)
    return whole_state(model)


def build_on_all_ranks(is_sharded: bool) -> tuple[Model, torch.optim.Optimizer]:
    """Build a model of the saved kind with other weights, sharded over as many ranks as there are, or whole."""
    if is_sharded:
        return Setup(mesh_shape=(dist.get_world_size(),)).build(seed=1)
    model = make_model(seed=1)
    return model, make_optimizer("AdamW", model)


def load_and_step(path: str, is_sharded: bool) -> tuple[State, State]:
    """Load; return the weights right after, and after one step on the data of all savers."""
    model, optimizer = build_on_all_ranks(is_sharded)
    load_checkpoint(model, optimizer, path)
    loaded = whole_state(model)
    train(model, optimizer, range(2, 3), range(NUM_SAVERS))
    return loaded, whole_state(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, State]:
    path = str(tmp_path_factory.mktemp("saved") / "step-2")
    return path, run_ranks(NUM_SAVERS, save_after_two_steps, path)[0]


@pytest.mark.parametrize(
    ("num_loaders", "is_sharded"),
    [(1, True), (2, True), (4, True), (1, False)],
    ids=["1 rank", "2 ranks", "4 ranks", "a whole model"],
)
def test_what_three_ranks_saved_trains_on_as_one_run_on(
    num_loaders: int, is_sharded: bool, saved: tuple[str, State]
) -> None:
    path, wanted = saved
    model = make_model()
    train(model, make_optimizer("AdamW", model), range(3), range(NUM_SAVERS))
    for loaded, one_step_later in run_ranks(num_loaders, load_and_step, path, is_sharded):
        assert differing(loaded, wanted) == []
        assert differing(one_step_later, model.state_dict(), 1e-5) == []


def save_whole(path: str) -> State:
    model = make_model()
    optimizer = make_optimizer("AdamW", model)
    train(model, optimizer, range(2), range(NUM_SAVERS))
    save_checkpoint(model, optimizer, path)
    return whole_state(model)


def test_a_whole_models_checkpoint_trains_on_sharded(tmp_path: Path) -> None:
    path = str(tmp_path / "whole")
    (wanted,) = run_ranks(1, save_whole, path)
    model = make_model()
    train(model, make_optimizer("AdamW", model), range(3), range(NUM_SAVERS))
    for loaded, one_step_later in run_ranks(2, load_and_step, path, True):
        assert differing(loaded, wanted) == []
        assert differing(one_step_later, model.state_dict(), 1e-5) == []


# ---------------------------------------------------------------------- the folder


def save_twice(path: str) -> tuple[Any, State, State]:
    model, optimizer = Setup(mesh_shape=(2,)).build(seed=0)
    save_checkpoint(model, optimizer, path, extra={"step": 0})
    train(model, optimizer, range(1), [dist.get_rank()])
    save_checkpoint(model, optimizer, path, extra={"step": 1})
    other, other_optimizer = Setup(mesh_shape=(2,)).build(seed=1)
    extra = load_checkpoint(other, other_optimizer, path)
    return extra, whole_state(other), whole_state(model)


def test_a_later_checkpoint_replaces_the_one_of_its_name_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for extra, loaded, wanted in run_ranks(2, save_twice, str(tmp_path / "latest")):
        assert extra == {"step": 1}
        assert differing(loaded, wanted) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


# ---------------------------------------------------------------------- refusals


def build_same(optimizer: str = "AdamW") -> tuple[Model, torch.optim.Optimizer]:
    model = shard_model(make_model(seed=1), world_mesh())
    return model, make_optimizer(optimizer, model)


def build_larger() -> tuple[Model, torch.optim.Optimizer]:
    """Build the saved model with a block more and a wider head."""
    model = make_model(seed=1, num_blocks=3)
    model.head = nn.Linear(WIDTH, VOCABULARY + 2, bias=False)
    shard_model(model, world_mesh())
    return model, make_optimizer("AdamW", model)


def build_smaller() -> tuple[Model, torch.optim.Optimizer]:
    model = shard_model(make_model(seed=1, num_blocks=1), world_mesh())
    return model, make_optimizer("AdamW", model)


def build_with_sgd() -> tuple[Model, torch.optim.Optimizer]:
    return build_same("SGD")


def refused(build: Callable[[], tuple[Model, torch.optim.Optimizer]], path: str) -> tuple[str, list[str]]:
    """Load into a model in use, which must be refused; return the message, and what has changed in the model."""
    model, optimizer = build()
    train(model, optimizer, range(1), [dist.get_rank()])
    before, optimizer_before = whole_state(model), optimizer_state(model, optimizer)
    optimizer_before = {name: value.clone() for name, value in optimizer_before.items()}
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(model, optimizer, path)
    changed = differing(whole_state(model), before) + differing(optimizer_state(model, optimizer), optimizer_before)
    if not torch.equal(torch.get_rng_state(), random_state):
        changed.append("random state")
    return str(refusal.value), changed


REFUSALS = {
    "a model with more and other tensors": (
        build_larger,
        [
            "blocks.2.experts: not in the checkpoint",
            "head.weight: (23, 7) in the checkpoint, (25, 7) here",
            "of another model",
            "nothing was loaded",
        ],
    ),
    "a model with fewer tensors": (build_smaller, ["blocks.1.project.weight: only in the checkpoint"]),
    "another optimizer": (
        build_with_sgd,
        ["of another optimizer", "nothing was loaded", "head.weight.momentum_buffer: not in the checkpoint"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_checkpoint_is_refused_with_names_and_shapes_and_nothing_changes_for(
    name: str, saved: tuple[str, State]
) -> None:
    build, wanted = REFUSALS[name]
    path, _ = saved
    for message, changed in run_ranks(2, refused, build, path):
        assert [part for part in [path, *wanted] if part not in message] == []
        assert changed == []


def test_a_missing_checkpoint_is_refused_by_its_path_and_nothing_changes(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    for message, changed in run_ranks(2, refused, build_same, path):
        assert path in message
        assert changed == []


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def load_the_working_directory(path: str) -> list[str]:
    """Load by paths without a name, where a checkpoint is and where none is, and try to save to such ones."""
    model = shard_model(make_model(0), world_mesh(), "optim_grads_params")
    saved = f"{path}/saved"
    save_checkpoint(model, None, saved)
    other = shard_model(make_model(1), world_mesh(), "optim_grads_params")
    with working_in(saved):
        load_checkpoint(other, None, ".")
    met = differing(whole_state(model), whole_state(other))
    with working_in(path):
        for use in (load_checkpoint, save_checkpoint):
            for name in ("", ".", ".."):
                try:
                    use(model, None, name)
                except CheckpointError as error:
                    met.append(str(error))
    return met


def test_the_working_directory_is_a_folder_to_load_from_and_refused_by_name_to_save_to(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.mkdir()
    for loaded, below, above, *saves in run_ranks(2, load_the_working_directory, str(path)):
        assert loaded.startswith(f"{path} holds no complete checkpoint")
        assert below == loaded
        assert "holds no complete checkpoint" in above
        assert [f"{path} is the working directory" in each for each in saves] == [True, True, False]
        assert f"{tmp_path} is a folder around the working directory {path}" in saves[2]
    assert [entry.name for entry in path.iterdir()] == ["saved"]


def test_a_folder_that_is_no_checkpoint_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for message, changed in run_ranks(2, refused, build_same, str(tmp_path)):
        assert str(tmp_path) in message
        assert "no complete checkpoint" in message
        assert changed == []


# ---------------------------------------------------------------------- without an optimizer


def load_without_optimizer(path: str) -> tuple[Any, State, float]:
    model, _ = build_same()
    extra = load_checkpoint(model, None, path)
    tokens = draw_tokens(0)
    return extra, whole_state(model), loss_of(model(tokens), tokens).item()


@pytest.mark.parametrize("has_optimizer", [True, False], ids=["with an optimizer", "without one"])
def test_a_model_alone_loads_from_a_checkpoint_saved(has_optimizer: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    wanted = run_ranks(NUM_SAVERS, save_after_two_steps, path, has_optimizer)[0]
    model = make_model(seed=1)
    model.load_state_dict(wanted)
    tokens = draw_tokens(0)
    for extra, loaded, loss in run_ranks(2, load_without_optimizer, path):
        assert str(extra) == str(EXTRA)
        assert differing(loaded, wanted) == []
        assert loss == pytest.approx(loss_of(model(tokens), tokens).item(), abs=1e-6)


def test_an_optimizer_is_refused_a_checkpoint_saved_without_one_and_nothing_changes(tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    run_ranks(2, save_model_alone, path)
    for message, changed in run_ranks(2, refused, build_same, path):
        assert "saved without an optimizer" in message
        assert changed == []


def save_model_alone(path: str) -> None:
    model, _ = build_same()
    save_checkpoint(model, None, path)
