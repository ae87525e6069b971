"""Gradients of Megatron's models under this engine are measured by ``check_gradient_scale``."""

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import GradientScale, check_gradient_scale
from tests.integration.megatron_training import EXPERTS, Job, batches, build, forward_step, megatron_processes
from tests.integration.ranks import run_ranks


def measured(strategy: str, is_per_token: bool) -> GradientScale:
    with megatron_processes():
        job = Job(strategy, model={**EXPERTS, "calculate_per_token_loss": is_per_token})
        model, optimizer = build(job)

        def loss_fn(inner: nn.Module, step: int) -> Tensor:
            output, loss_function = forward_step(batches(step), inner)
            loss: Tensor = loss_function(output)[0]
            return loss

        def finish() -> None:
            model.finish_grad_sync()
            if is_per_token:
                model.scale_gradients(1 / 32)

        expected = 1 / 32 if is_per_token else 1 / dist.get_world_size()
        return check_gradient_scale(
            model, loss_fn, 0, expected=expected, duplicate=False, finish=finish, norm=optimizer.get_grad_norm
        )


@pytest.mark.parametrize("is_per_token", [False, True])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_megatrons_gradients_have_the_factor_of_its_losses(strategy: str, is_per_token: bool) -> None:
    for report in run_ranks(2, measured, strategy, is_per_token):
        wanted = 1 / 32 if is_per_token else 0.5
        assert all(each.factor == pytest.approx(wanted, rel=1e-6) for each in report.parameters)
        assert any("experts" in each.name for each in report.parameters)
        assert report.norm is not None
        assert report.norm.found == pytest.approx(report.norm.expected, rel=1e-5)
