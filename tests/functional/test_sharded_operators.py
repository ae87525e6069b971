"""What users do to parameters between steps gives sharded models the values that the whole model would have."""

import io
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import FlatDTensor
from megatron_fsdp import AdamW, MixedPrecisionPolicy, fully_shard
from tests.harness import on_ranks, run_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, draw_tokens, loss_of, make_mesh, make_model
from tests.harness.oracle import differing, shard_model, train, whole_state

State = dict[str, torch.Tensor]
LAYOUTS = {
    "one rank": ("optim_grads_params", (1,)), "three ranks": ("optim_grads_params", (3,)),
    "optimizer state alone": ("optim", (2,)), "replicated": ("no_shard", (2,)), "hsdp": ("hsdp", (2, 2)),
    "hfsdp": ("hfsdp", (2, 2)),
}  # fmt: skip


def num_ranks(layout: str) -> int:
    return torch.Size(LAYOUTS[layout][1]).numel()


def sharded_model(layout: str, policy: MixedPrecisionPolicy | None = None) -> Model:
    strategy, mesh_shape = LAYOUTS[layout]
    return shard_model(make_model(), make_mesh(mesh_shape), strategy, policy)


def reset(model: Model) -> None:
    """Initialise everything that has a method for it, and the rest by hand."""
    model.embedding.padding_idx = 3
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for block in model.blocks:
        nn.init.trunc_normal_(block.experts, std=0.2)
        nn.init.constant_(block.gain, 0.5)
        nn.init.orthogonal_(block.project.weight, gain=0.9)
    with torch.no_grad():
        model.head.weight.normal_(0, 0.02)
        model.shift.uniform_(-1, 1)


def initialise(layout: str) -> tuple[State, torch.Tensor, float]:
    """Return the whole state after a reset from a seed, the generator's state, and a loss after it."""
    model, tokens = sharded_model(layout), draw_tokens(0)
    loss_of(model(tokens), tokens).backward()
    torch.manual_seed(11)
    reset(model)
    state = torch.get_rng_state()
    return whole_state(model), state, loss_of(model(tokens), tokens).item()


@pytest.mark.parametrize("layout", nightly_but(["three ranks", "replicated", "hfsdp"], LAYOUTS))
def test_a_reset_draws_the_values_of_the_whole_model_from_the_same_seed(layout: str) -> None:
    model, tokens = make_model(), draw_tokens(0)
    torch.manual_seed(11)
    reset(model)
    generator = torch.get_rng_state()
    loss = loss_of(model(tokens), tokens).item()
    for state, sharded_generator, sharded_loss in run_ranks(num_ranks(layout), initialise, layout):
        assert differing(state, model.state_dict()) == []
        assert torch.equal(sharded_generator, generator)
        assert sharded_loss == pytest.approx(loss, rel=1e-5)


def initialise_in_bf16() -> State:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded_model("three ranks", policy)
    torch.manual_seed(11)
    reset(model)
    return whole_state(model)


def test_main_weights_of_bf16_compute_are_reset_in_fp32() -> None:
    model = make_model()
    torch.manual_seed(11)
    reset(model)
    for state in run_ranks(3, initialise_in_bf16):
        assert differing(state, model.state_dict()) == []


def average(model: Model, ranks: list[int]) -> State:
    """Train with an average of weights that is made out of place, and return it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(3):
        train(model, optimizer, range(step, step + 1), ranks)
        for name, parameter in model.named_parameters():
            averages[name] = averages[name] * 0.75 + parameter.detach() * 0.25
    doubled = {name: torch.lerp(value, value.double().float() * 2, 0.5) for name, value in averages.items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in doubled.items()}


@pytest.mark.parametrize("layout", nightly_but(["three ranks", "hfsdp"], ["three ranks", "hsdp", "hfsdp"]))
@on_ranks(num_ranks)
def test_averages_of_weights_that_are_made_out_of_place_are_those_of_the_whole_model(layout: str) -> None:
    wanted = average(make_model(), list(range(num_ranks(layout))))
    averages = average(sharded_model(layout), [dist.get_rank()])
    assert differing(averages, wanted, 1e-5) == []


def measure(model: Model, ranks: list[int]) -> list[float]:
    for rank in ranks:
        tokens = draw_tokens(rank)
        (loss_of(model(tokens), tokens) / len(ranks)).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        found = [nn.utils.get_total_norm(gradients, order) for order in (1.0, 2.0, float("inf"))]
        found += [nn.utils.parameters_to_vector(model.parameters()).norm()]
        for parameter in model.parameters():
            found += [parameter.mean(), parameter.std(correction=0), parameter.abs().max(), parameter.min()]
            found += [torch.isfinite(parameter).all().float(), (parameter > 0).sum().float(), parameter.flatten()[-1]]
        found += [torch.stack([gradient.norm() for gradient in gradients]).norm()]
    return [value.item() for value in found]


@pytest.mark.parametrize("layout", nightly_but(["three ranks", "hsdp"], ["three ranks", "hsdp", "hfsdp"]))
@on_ranks(num_ranks)
def test_what_is_logged_of_weights_and_gradients_is_that_of_the_whole_model(layout: str) -> None:
    wanted = measure(make_model(), list(range(num_ranks(layout))))
    found = measure(sharded_model(layout), [dist.get_rank()])
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", ["three ranks", "hfsdp"])
@on_ranks(num_ranks)
def test_parameters_that_are_assigned_from_one_vector_are_doubled(layout: str) -> None:
    wanted = {name: value * 2 if name != "positions" else value for name, value in make_model().state_dict().items()}
    model = sharded_model(layout)
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
    state = whole_state(model)
    assert differing(state, wanted) == []


SCALED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW over flat buffers": (AdamW, {"lr": 0.01}),
}


def overflow(model: Model, ranks: list[int], name: str, *, is_clipped: bool) -> State:
    """Overflow in one rank's loss of the third step; the optimizer is built after the first forward."""
    kind, options = SCALED[name]
    if not dist.is_initialized() and kind is AdamW:
        kind = torch.optim.AdamW
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), []
    optimizer = None
    for step in range(5):
        for rank in ranks:
            tokens = draw_tokens(rank, step)
            loss = loss_of(model(tokens), tokens) / len(ranks)
            if optimizer is None:
                optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
            scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
        assert optimizer is not None
        if dist.is_initialized() and model.head.weight.grad is not None and not isinstance(model.head.weight, DTensor):
            dist.all_reduce(model.head.weight.grad, dist.ReduceOp.AVG)
        if is_clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return whole_state(model) | {"scales": torch.tensor(scales)}


def overflow_sharded(name: str, is_clipped: bool, is_mixed: bool) -> State:
    model = make_model()
    ignored = {model.head.weight} if is_mixed else set()
    for block in model.blocks:
        fully_shard(block)
    # All of it in units that release their weights, so that the optimizer meets sharded parameters after a forward.
    fully_shard(model, ignored_params=ignored, reshard_after_forward=True)
    return overflow(model, [dist.get_rank()], name, is_clipped=is_clipped)


OVERFLOWS = list(product(SCALED, (False, True), (False, True)))


@pytest.mark.parametrize(("name", "is_clipped", "is_mixed"), nightly_but(OVERFLOWS[::5], OVERFLOWS))
def test_an_overflow_on_one_rank_leaves_out_the_step_of_all(name: str, is_clipped: bool, is_mixed: bool) -> None:
    wanted = overflow(make_model(), [0, 1], name, is_clipped=is_clipped)
    assert wanted["scales"].tolist() == [64.0, 128.0, 64.0, 64.0, 128.0]
    for found in run_ranks(2, overflow_sharded, name, is_clipped, is_mixed):
        assert differing(found, wanted, 1e-5) == []


@pytest.mark.parametrize("layout", ["three ranks", "hfsdp"])
@on_ranks(num_ranks)
def test_a_rank_goes_on_from_its_own_file(layout: str) -> None:
    model = sharded_model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2), [dist.get_rank()])
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    assert all(type(value) is FlatDTensor for name, value in weights.items() if name != "positions")
    other = sharded_model(layout)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4), [dist.get_rank()])
    train(other, other_optimizer, range(2, 4), [dist.get_rank()])
    continued, resumed = whole_state(model), whole_state(other)
    assert differing(resumed, continued) == []


Change = Callable[[Model], object]
CHANGES: dict[str, Change] = {
    "a row": lambda model: model.embedding.weight[3].fill_(0.0),
    "rows": lambda model: model.head.weight[5:19].mul_(2.0),
    "a column": lambda model: model.head.weight[:, 2].zero_(),
    "an expert": lambda model: model.blocks[1].experts[1].add_(1.0),
    "a transpose": lambda model: model.blocks[0].project.weight.T.tril_(),
    "all elements": lambda model: model.embedding.weight.view(-1)[10:150:7].neg_(),
    "assignment": lambda model: model.norm.weight.__setitem__(slice(2, 5), 3.0),
    "a list of rows": lambda model: model.head.weight.__setitem__([0, 22, 7], 1.0),
    "a diagonal": lambda model: model.blocks[0].project.weight.fill_diagonal_(9.0),
}


def change(layout: str) -> tuple[State, float]:
    model, tokens = sharded_model(layout), draw_tokens(0)
    loss_of(model(tokens), tokens).backward()
    with torch.no_grad():
        for function in CHANGES.values():
            function(model)
    return whole_state(model), loss_of(model(tokens), tokens).item()


WRITTEN = ("one rank", "three ranks", "optimizer state alone", "hfsdp")


@pytest.mark.parametrize("layout", nightly_but(WRITTEN[1:3], WRITTEN))
def test_writing_through_views_changes_the_weights_that_the_next_forward_uses(layout: str) -> None:
    model, tokens = make_model(), draw_tokens(0)
    with torch.no_grad():
        for function in CHANGES.values():
            function(model)
    wanted_loss = loss_of(model(tokens), tokens).item()
    for state, loss in run_ranks(num_ranks(layout), change, layout):
        assert differing(state, model.state_dict()) == []
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
