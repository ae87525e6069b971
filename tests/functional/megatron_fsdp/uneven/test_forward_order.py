"""With set_forward_order, ranks that run different units train like the plain model on the data of all ranks.

More programs, also with frozen units, units called several times and an order that the caller gives, are in
``programs.py``.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbuffer import MeshError
from megatron_fsdp import ConfigError, CPUOffloadPolicy, FsdpConfig, StateError, fully_shard, unsharded
from megatron_fsdp.certify.certificate import certify
from megatron_fsdp.variants.forward_order import share_forward_order
from tests.functional.megatron_fsdp.uneven.programs import Routed, layer_drop, loss_of, shard, train
from tests.harness import on_ranks
from tests.harness.models import inputs
from tests.harness.twins import Twins

OPTIONS: dict[str, dict[str, Any]] = {
    **{f"reshard {reshard}": {"reshard_after_forward": reshard} for reshard in (True, False, 2)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2)
def test_every_option_of_fully_shard_trains_as_the_plain_model(options: dict[str, Any]) -> None:
    train(Twins(lambda: Routed(4), "optim_grads_params", shard, **options), layer_drop)


@on_ranks(2)
def test_units_that_stay_after_backward_train_as_the_plain_model() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    twins.model.set_reshard_after_backward(False)
    train(twins, layer_drop)


def shard_compiled(model: Any, strategy: str) -> None:
    """Compile each part, then make units of them."""
    for part in model.parts:
        part.compile(backend="aot_eager")
    shard(model, strategy)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@on_ranks(2, timeout=300)
def test_compiled_units_train_as_the_plain_model() -> None:
    train(Twins(lambda: Routed(4), "optim_grads_params", shard_compiled), layer_drop)


class WithoutGrad(Routed):
    """Runs the part ``quiet`` under ``no_grad``."""

    def __init__(self, quiet: int) -> None:
        super().__init__(4)
        self.quiet = quiet

    def run(self, x: torch.Tensor, segment: list[int]) -> torch.Tensor:
        """Run some parts."""
        for number in segment:
            with torch.set_grad_enabled(torch.is_grad_enabled() and number != self.quiet):
                found = self.parts[number](x)
            x = x + found if number == self.quiet else found
        return x


def skips_two(rank: int, step: int) -> list[int]:
    return [0, 1, 2, 3] if (rank + step) % 2 else [0, 2]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@on_ranks(2)
def test_a_unit_under_no_grad_may_be_skipped(strategy: str) -> None:
    train(Twins(lambda: WithoutGrad(1), strategy, shard), skips_two)


@on_ranks(4)
def test_a_unit_under_no_grad_keeps_the_part_that_other_ranks_keep() -> None:
    train(Twins(lambda: WithoutGrad(3), "optim_grads_params", shard, reshard_after_forward=2), skips_two)


@pytest.mark.parametrize("place", [1, 3])
@on_ranks(2)
def test_ranks_that_skip_a_unit_follow_its_freezing(place: int) -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    for is_trained in (True, False, True):
        for model in twins:
            model.zero_grad()
            model.parts[place].requires_grad_(is_trained)
        twins.backward(0, lambda model, rank, step: loss_of(model, rank, step, [0, 1, 2, 3] if rank else [0, 2]))
        assert twins.gradients_apart() < 1e-6


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_streams_are_in_order_where_ranks_skip_units(strategy: str) -> None:
    model = Twins(lambda: Routed(4), strategy, shard).model
    rank = dist.get_rank()
    # The first forward agrees between ranks on the order of use, once.
    loss_of(model, rank, 0, layer_drop(rank, 0)).backward()
    model.zero_grad()
    with certify(model) as check:
        for step in range(3):
            loss_of(model, rank, step, layer_drop(rank, step)).backward()
            model.zero_grad()
    certificate = check.certificate()
    assert certificate.num_conflicts > 5
    # Whether an unused parameter has a gradient is known only after all ranks have reported, so the host waits.
    assert certificate.is_clean(["a wait for an event"]), list(certificate.lines())


@on_ranks(2)
def test_a_rank_without_a_trained_parameter_takes_part() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    for model in twins:
        model.requires_grad_(False)
        model.parts[1].requires_grad_(True)
    loss = twins.model(inputs(dist.get_rank(), 0, 2, 5), [0, 1, 2] if dist.get_rank() else [0, 2]).square().mean()
    loss.backward()
    (twins.plain(inputs(1, 0, 2, 5), [0, 1, 2]).square().mean() / 2).backward()
    assert twins.gradients_apart() < 1e-6


@on_ranks(2)
def test_two_forwards_before_one_backward_give_the_plain_gradients() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        losses = [
            model(inputs(rank, 2 * step + n, 2, 5), layer_drop(rank, 2 * step + n)).square().mean() for n in range(2)
        ]
        return torch.stack(losses).sum()

    for step in range(3):
        twins.backward(step, loss)
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()


@on_ranks(2)
def test_a_call_out_of_order_names_both_units_and_the_fix() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    with pytest.raises(StateError, match=r"unit 'parts.1' .* unit 'parts.2'.*set_forward_order.*set_reshard_after"):
        twins.model(inputs(0, 0, 2, 5), [2, 1])


@on_ranks(2)
def test_a_call_outside_of_the_roots_forward_names_the_unit() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)
    with pytest.raises(StateError, match=r"unit 'parts.1' was called outside of the root's forward"):
        twins.model.parts[1](inputs(0, 0, 2, 7))
    with torch.no_grad(), unsharded(twins.model):
        twins.model.parts[dist.get_rank()](inputs(0, 0, 2, 7))


@on_ranks(1)
def test_an_order_has_to_name_every_unit_once() -> None:
    twins = Twins(lambda: Routed(3), "optim_grads_params", shard)
    with pytest.raises(ConfigError, match=r"'parts.2' are missing"):
        twins.model.set_forward_order(twins.model.parts[:2])
    with pytest.raises(ConfigError, match=r"'parts.0' come twice"):
        twins.model.set_forward_order([twins.model.parts[0], *twins.model.parts])
    with pytest.raises(StateError, match="root"):
        twins.model.parts[0].set_forward_order()


@on_ranks(2)
def test_without_an_order_the_error_names_it_as_the_fix() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard_without_order)
    with pytest.raises(MeshError, match=r"fix: root\.set_forward_order\(\).*unsharded\(model\).*join\(model"):
        twins.model(inputs(0, 0, 2, 5), [0, 1] if dist.get_rank() else [1])


def shard_without_order(model: Any, strategy: str) -> None:
    """Make each part a unit."""
    shard(model, strategy).__dict__["_fsdp_unit"].root.order = None


@on_ranks(2)
def test_a_forward_retried_while_an_exception_is_handled_trains() -> None:
    twins = Twins(lambda: Routed(4), "optim_grads_params", shard)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        try:
            model(inputs(rank, step, 2, 6), [0])
        except RuntimeError:
            found: torch.Tensor = model(inputs(rank, step, 2, 5), layer_drop(rank, step)).square().mean()
        return found

    for step in range(2):
        twins.backward(step, loss)
        assert twins.gradients_apart() < 1e-6
        twins.zero_grad()


@on_ranks(1)
def test_flags_and_keys_set_the_order_of_every_root() -> None:
    for config in (
        FsdpConfig(use_megatron_fsdp=True, fsdp_forward_order=True),
        FsdpConfig.from_hf({"fsdp_version": 2, "fsdp_forward_order": True}),
    ):
        twins = Twins(lambda: nn.ModuleList(Routed(1) for _ in range(2)), shard=shard_both)
        config.apply(twins.model)
        assert all(part.__dict__["_fsdp_unit"].root.order is not None for part in twins.model)


def shard_both(models: Any) -> None:
    """Make two roots without an order."""
    for model in models:
        shard_without_order(model, "optim_grads_params")


@on_ranks(1)
def test_fully_shard_around_a_model_that_has_an_order_is_refused() -> None:
    twins = Twins(lambda: Routed(1), "optim_grads_params", shard)
    outer = nn.Sequential(twins.model)
    with pytest.raises(ConfigError, match=r"Sequential contains unit 'Routed', .* after the last fully_shard"):
        fully_shard(outer)
    assert list(dict(twins.model.named_parameters())) == list(dict(twins.plain.named_parameters()))
    with pytest.raises(StateError, match=r"Linear contains no unit.* fix: call fully_shard"):
        share_forward_order(nn.Linear(1, 1))
