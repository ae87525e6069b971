"""Operations on parameters between steps give sharded models the same values as whole models."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import FlatDTensor
from megatron_fsdp import AdamW, MixedPrecisionPolicy
from tests.harness import on_ranks
from tests.harness.grids import nightly_but
from tests.harness.models import Model, draw_tokens, loss_of, make_model
from tests.harness.oracle import differing, sharded, sharded_model, token_loss, train, whole_state

State = dict[str, torch.Tensor]
LAYOUTS = {
    "one rank": ("optim_grads_params", 1), "three ranks": ("optim_grads_params", 3),
    "optimizer state alone": ("optim", 2), "replicated": ("no_shard", 2), "hsdp": ("hsdp", 4), "hfsdp": ("hfsdp", 4),
}  # fmt: skip


def num_ranks(layout: str) -> int:
    return LAYOUTS[layout][1]


def both(layout: str, **options: Any) -> tuple[Model, Model]:
    """Return a sharded model and the same one whole."""
    return sharded_model(LAYOUTS[layout][0], **options), make_model()


def reset(model: Any) -> torch.Tensor:
    """Initialise modules that have a method for it, and the others by hand; return the generator's state afterwards."""
    torch.manual_seed(11)
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
    return torch.get_rng_state()


@pytest.mark.parametrize("layout", nightly_but(["three ranks", "replicated", "hfsdp"], LAYOUTS))
@on_ranks(num_ranks)
def test_a_reset_draws_the_values_of_the_whole_model_from_the_same_seed(layout: str) -> None:
    model, plain = both(layout)
    token_loss(model, 0, 0).backward()
    assert torch.equal(reset(model), reset(plain))
    assert differing(whole_state(model), plain.state_dict()) == []
    assert token_loss(model, 0, 0).item() == pytest.approx(token_loss(plain, 0, 0).item(), rel=1e-5)


@on_ranks(3)
def test_main_weights_of_bf16_compute_are_reset_in_fp32() -> None:
    model, plain = both("three ranks", mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    reset(model)
    reset(plain)
    assert differing(whole_state(model), plain.state_dict()) == []


def average(model: Model) -> State:
    """Train with an average of weights that is computed out of place, and return the average."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(3):
        train(model, optimizer, [step])
        for name, parameter in model.named_parameters():
            averages[name] = averages[name] * 0.75 + parameter.detach() * 0.25
    doubled = {name: torch.lerp(value, value.double().float() * 2, 0.5) for name, value in averages.items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in doubled.items()}


@pytest.mark.parametrize("layout", nightly_but(["three ranks", "hfsdp"], ["three ranks", "hsdp", "hfsdp"]))
@on_ranks(num_ranks)
def test_out_of_place_weight_averages_equal_the_whole_models(layout: str) -> None:
    found, wanted = map(average, both(layout))
    assert differing(found, wanted, 1e-5) == []


def measure(model: Model) -> list[float]:
    train(model, steps=[0])
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
def test_logged_values_of_weights_and_gradients_equal_the_whole_models(layout: str) -> None:
    found, wanted = map(measure, both(layout))
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


SCALED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
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
    kind = torch.optim.AdamW if kind is AdamW and len(ranks) > 1 else kind
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), []
    optimizer = None
    for step in range(5):
        for rank in ranks:
            tokens = draw_tokens(rank, step)
            loss = loss_of(model(tokens), tokens) / len(ranks)
            if optimizer is None:
                optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
            scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
        if len(ranks) == 1 and not isinstance(model.head.weight, DTensor):
            dist.all_reduce(model.head.weight.grad, dist.ReduceOp.AVG)
        assert optimizer is not None
        if is_clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return whole_state(model) | {"scales": torch.tensor(scales)}


OVERFLOWS = list(product(SCALED, (False, True), (False, True)))


@pytest.mark.parametrize(("name", "is_clipped", "is_mixed"), nightly_but(OVERFLOWS[::5], OVERFLOWS))
@on_ranks(2)
def test_an_overflow_on_one_rank_leaves_out_the_step_of_all(name: str, is_clipped: bool, is_mixed: bool) -> None:
    wanted = overflow(make_model(), [0, 1], name, is_clipped=is_clipped)
    assert wanted["scales"].tolist() == [64.0, 128.0, 64.0, 64.0, 128.0]
    model = make_model()
    # Units release their weights after forward, so that the optimizer meets sharded parameters then.
    sharded(model, ignored_params={model.head.weight} if is_mixed else set(), reshard_after_forward=True)
    found = overflow(model, [dist.get_rank()], name, is_clipped=is_clipped)
    assert differing(found, wanted, 1e-5) == []


@pytest.mark.parametrize("layout", ["three ranks", "hfsdp"])
@on_ranks(num_ranks)
def test_a_rank_goes_on_from_its_own_file(layout: str) -> None:
    model, other = (sharded_model(LAYOUTS[layout][0]) for _ in range(2))
    optimizer, other_optimizer = (torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, other))
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    assert all(type(value) is FlatDTensor for name, value in weights.items() if name != "positions")
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4))
    train(other, other_optimizer, range(2, 4))
    resumed, continued = whole_state(other), whole_state(model)
    assert differing(resumed, continued) == []


def doubled_as_one_vector(model: Model) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())


CHANGES: dict[str, Callable[[Any], object]] = {
    "a row": lambda model: model.embedding.weight[3].fill_(0.0),
    "rows": lambda model: model.head.weight[5:19].mul_(2.0),
    "a column": lambda model: model.head.weight[:, 2].zero_(),
    "an expert": lambda model: model.blocks[1].experts[1].add_(1.0),
    "a transpose": lambda model: model.blocks[0].project.weight.T.tril_(),
    "all elements": lambda model: model.embedding.weight.view(-1)[10:150:7].neg_(),
    "assignment": lambda model: model.norm.weight.__setitem__(slice(2, 5), 3.0),
    "a list of rows": lambda model: model.head.weight.__setitem__([0, 22, 7], 1.0),
    "a diagonal": lambda model: model.blocks[0].project.weight.fill_diagonal_(9.0),
    "all in one vector": doubled_as_one_vector,
}
WRITTEN = ("one rank", "three ranks", "optimizer state alone", "hfsdp")


@pytest.mark.parametrize("layout", nightly_but(WRITTEN[1:], WRITTEN))
@on_ranks(num_ranks)
def test_writing_through_views_changes_the_weights_that_the_next_forward_uses(layout: str) -> None:
    model, plain = both(layout)
    token_loss(model, 0, 0).backward()
    for name, function in CHANGES.items():
        for one in (model, plain):
            with torch.no_grad():
                function(one)
        state = whole_state(model)
        assert differing(state, plain.state_dict()) == [], name
    assert token_loss(model, 0, 0).item() == pytest.approx(token_loss(plain, 0, 0).item(), rel=1e-5)
