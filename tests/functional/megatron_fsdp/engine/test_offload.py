"""Gradient sums in CPU memory: the copies from the device, and the additions on the CPU."""

from typing import Any

import pytest
import torch

from dbuffer_kernels import accumulate
from megatron_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from megatron_fsdp.certify.checker import Checker
from megatron_fsdp.certify.clocks import VirtualStreams
from megatron_fsdp.engine import reduce as last_reduction
from megatron_fsdp.engine.streams import drive_with
from tests.harness import on_ranks
from tests.harness.models import inputs
from tests.harness.twins import Twins


@pytest.mark.parametrize("strategy", ["optim_grads_params", "hsdp"])
@on_ranks(4)
def test_the_first_microbatch_is_copied_and_the_host_adds_later_ones(strategy: str) -> None:
    twins = Twins(strategy=strategy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    added: list[bool] = []

    def counted(source: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        added.append(not options.get("overwrite", False))
        return accumulate(source, out, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_reduction, "accumulate", counted)
        for step in range(3):
            twins.model.set_is_last_backward(step == 2)
            twins.backward(step)
            assert len(added) > 0
            assert set(added) == {step > 0}
            added.clear()
    assert twins.gradients_apart() < 2e-6
    twins.zero_grad()
    twins.backward(3)
    assert twins.gradients_apart() < 2e-6


@on_ranks(3)
def test_sums_of_sixteen_bits_are_scaled_in_at_least_fp32_on_their_way_to_the_host() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)
    settings: list[dict[str, Any]] = [{}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
    here, there = (Twins(strategy="optim_grads_params", mp_policy=policy, **options).model for options in settings)
    for model in (here, there):
        for step in range(2):
            model(torch.full((2, 7), 1.0 + step, dtype=torch.bfloat16)).float().square().mean().backward()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


@pytest.mark.parametrize("strategy", ["optim_grads_params", "hsdp", "hfsdp"])
@on_ranks(4)
def test_the_host_waits_once_per_backward_if_it_has_nothing_to_add(strategy: str) -> None:
    double = VirtualStreams()
    with drive_with(double), Checker(double) as checker:
        model = Twins(strategy=strategy, offload_policy=CPUOffloadPolicy()).model
        groups = [group for module in (*model.layers, model) for group in module.parameter_groups]

        def of_reductions() -> int:
            return sum(wait.is_host and wait.source.name == "reduce lane" for wait in double.waits)

        for step in range(2):
            for microbatch, wanted in enumerate((1, len(groups), 1)):
                for group in groups:
                    checker.lies_on_host(group.main_grad.local_buffer)
                before = of_reductions()
                if microbatch == 2:
                    model.zero_grad()
                model(inputs(step, microbatch)).square().mean().backward()
                assert of_reductions() - before <= wanted
                assert of_reductions() > before
            # The host reads sums that were copied.
            assert all(bool(group.main_grad.local_buffer.isfinite().all()) for group in groups)
            model.zero_grad()
        assert not checker.memory.conflicts


@pytest.mark.parametrize("strategy", ["optim_grads_params", "hfsdp"])
@on_ranks(4)
def test_gathers_of_offloaded_weights_need_no_host_cast_and_no_wait_in_backward(strategy: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, main_params_dtype=torch.float32)
    double = VirtualStreams()
    with drive_with(double), Checker(double) as checker:
        model = Twins(strategy=strategy, mp_policy=policy, offload_policy=CPUOffloadPolicy()).model
        for module in (*model.layers, model):
            for group in module.parameter_groups:
                checker.lies_on_host(group.main_weight.local_buffer, group.model_weight.local_buffer)
        host, waits = double.host.clock, double.waits

        def of_gathers() -> int:
            return sum(wait.is_host and wait.source.name == "gather lane" for wait in waits)

        for microbatch in range(3):
            before = host.get("host", 0)
            loss = model(inputs(0, microbatch).bfloat16()).float().square().mean()
            assert host.get("host", 0) == before, "the CPU computes in a forward"
            assert of_gathers() == microbatch
            loss.backward()
            assert of_gathers() == microbatch + 1
        with torch.no_grad():
            model(inputs(0, 0).bfloat16())
            assert of_gathers() == 4, "what is evaluated may be changed at once"
            model.layers[0].parameter_groups[0].main_weight.local_buffer.mul_(2)
            model(inputs(0, 0).bfloat16())
        assert not checker.memory.conflicts
