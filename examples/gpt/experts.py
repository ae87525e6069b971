"""Experts of one shape, stacked, and the way of tokens to the rank that has theirs and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from gpt.model_config import GptConfig

__all__ = ["Experts", "StackedLinear", "activated"]


def activated(inner: Tensor, config: GptConfig) -> Tensor:
    """Return what lies between the two layers of an MLP: GELU (tanh), or with ``--swiglu`` gate times value."""
    if not config.swiglu:
        return functional.gelu(inner, approximate="tanh")
    gate, value = inner.chunk(2, dim=-1)
    return functional.silu(gate) * value


class StackedLinear(nn.Module):
    """The weights (experts, out, in) and biases (experts, out) of linear layers, one for each expert."""

    def __init__(self, num_experts: int, num_in: int, num_out: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, num_out, num_in) * num_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts, num_out)) if has_bias else None


class Experts(nn.Module):
    """MLPs of which each computes the tokens that are sent to it; each rank may have some of them only."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        has_bias, width, ffn = not config.disable_bias_linear, config.hidden_size, config.ffn_hidden_size
        inner = 2 * ffn if config.swiglu else ffn
        self.linear_fc1 = StackedLinear(config.num_experts, width, inner, has_bias=has_bias)
        self.linear_fc2 = StackedLinear(config.num_experts, ffn, width, has_bias=has_bias)
        self._config = config
        self._expert_group: dist.ProcessGroup | None = None
        self._tensor_group: dist.ProcessGroup | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the weights, in place.

        Args:
            mesh: of one or both of the axes "ep", which divides the experts, and "tp", which divides each of them: by
                the rows of the first layer and the columns of the second.
        """
        names = mesh.mesh_dim_names or ()
        of_tensor: dict[str, Placement] = {
            "linear_fc1.weight": Shard(1),
            "linear_fc1.bias": Shard(1),
            "linear_fc2.weight": Shard(2),
            "linear_fc2.bias": Replicate(),
        }
        for name, parameter in list(self.named_parameters()):
            placements = [Shard(0) if axis == "ep" else of_tensor[name] for axis in names]
            value = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
            layer, attribute = name.split(".")
            setattr(self.get_submodule(layer), attribute, nn.Parameter(value, requires_grad=parameter.requires_grad))
        self._expert_group = mesh.get_group("ep") if "ep" in names else None
        self._tensor_group = mesh.get_group("tp") if "tp" in names else None

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs, (rows, hidden), row by row.

        Args:
            tokens: (rows, hidden), those of the first expert first, then those of the second, and so on.
            counts: (experts,) int64, how many each has; the host waits for them.
        """
        group = self._expert_group
        if group is None:
            return self._computed(tokens, counts.tolist())
        # By the rank that they come from, and its rows for each expert that is here.
        arriving = all_to_all_single(counts, None, None, group).view(group.size(), -1)
        sent = counts.view(group.size(), -1).sum(1).tolist()
        received = arriving.sum(1).tolist()
        mine = all_to_all_single_autograd(tokens, received, sent, group)
        expert_of_row = torch.arange(arriving.shape[1], device=tokens.device).repeat(group.size())
        order = expert_of_row.repeat_interleave(arriving.flatten()).argsort(stable=True)
        done = self._computed(mine[order], arriving.sum(0).tolist())
        done = torch.zeros_like(done).index_copy(0, order, done)
        result: Tensor = all_to_all_single_autograd(done, sent, received, group)
        return result

    def _computed(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        first, second, group = self.linear_fc1, self.linear_fc2, self._tensor_group
        if group is not None:
            tokens = _GradientSummed.apply(tokens, group)  # type: ignore[no-untyped-call]  # of torch
        biases = [None] * len(counts) if first.bias is None else _own(first.bias).unbind(0)
        weights = zip(
            tokens.split(list(counts)), _own(first.weight).unbind(0), biases, _own(second.weight).unbind(0), strict=True
        )
        rows = [
            functional.linear(activated(functional.linear(x, up, bias), self._config), down)
            for x, up, bias, down in weights
        ]
        output = torch.cat(rows)
        if group is not None:
            output = _Summed.apply(output, group)  # type: ignore[no-untyped-call]  # of torch
        if second.bias is None:
            return output
        repeats = torch.tensor(counts, device=tokens.device)
        return output + _own(second.bias).repeat_interleave(repeats, dim=0, output_size=len(output))


def _own(parameter: Tensor) -> Tensor:
    """Return this rank's part of a weight, which it alone computes with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Summed(torch.autograd.Function):
    """Parts of a sum that the ranks of a group have, added up; each of them then goes on with the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _over(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GradientSummed(torch.autograd.Function):
    """What all ranks of a group have, for each of them to compute another part with: their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _over(gradients[0], ctx.group), None


def _over(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = all_reduce(part.contiguous(), "sum", group)
    return total
