"""Flat buffers as DTensors: sharded tensors with their true shapes, on which PyTorch's own tools work unchanged.

PyTorch passes every function call on such a tensor to its ``__torch_function__``. ``op_table`` says how the function
runs: on each rank's rows, on whole tensors, or natively. See docs/design/facade.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from dbuffer.dtensor.attribute_ops import run_native
from dbuffer.dtensor.autograd import enter_local, enter_whole, is_recorded, leave, run_recorded
from dbuffer.dtensor.checkpoint_chunks import chunks_of, shard_at, write_items_of
from dbuffer.dtensor.distribution import Distribution, FlatRows, RaggedShard, contiguous_stride
from dbuffer.dtensor.gathered_ops import Arguments
from dbuffer.dtensor.op_table import OPERATORS, operator_of
from dbuffer.dtensor.placed_tensor import PlacedTensor
from dbuffer.errors import PlacementError

__all__ = ["FlatDTensor", "FlatRows", "RaggedShard"]


_OF_THIS_OBJECT = ("on_grad_dropped", "gradient_of")


class FlatDTensor(PlacedTensor):
    """A DTensor whose rows are distributed as in a flat buffer. All operators keep this distribution.

    Element-wise functions, casts and new tensors of the same shape run on each rank's rows. Sums, means and norms take
    one all-reduce. Every other PyTorch function runs on whole tensors: it is correct, but it gathers, and every rank of
    the mesh must call it. In-place functions write each rank's rows. Random in-place functions draw the values that the
    whole plain tensor would get from the same generator.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a PyTorch function that has such a tensor among its arguments."""
        operator = OPERATORS.get(func) or operator_of(func)
        if operator.run is run_native:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # Tested first: optimizers call functions on each parameter, without autograd.
        if torch.is_grad_enabled() and operator.is_differentiable and is_recorded(args, kwargs or {}):
            return run_recorded(operator, args, kwargs or {})
        return operator.run(operator, args, kwargs or {})

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> FlatDTensor:
        """Make a tensor from this rank's part; see ``DTensor.from_local``."""
        made = DTensor.from_local(local_tensor.detach(), device_mesh, placements, **options)
        result = FlatDTensor(made._local_tensor, made._spec, requires_grad=False)
        return leave(local_tensor, result) if is_recorded((local_tensor,), {}) else result  # type: ignore[return-value]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor. All ranks of the mesh must call this together."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        return enter_whole(self) if is_recorded((self,), {}) else self.whole()

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's part; it shares this tensor's memory."""
        if grad_placements is not None:
            return super().to_local(grad_placements=grad_placements)
        if is_recorded((self,), {}):
            return enter_local(self)
        local = self._local_tensor if self.window is None else self.whole()
        return local.view_as(local) if torch.is_grad_enabled() else local

    # The torch.compile interface; DTensor's own methods would make plain DTensors.

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> FlatDTensor:
        """Rebuild the tensor from its inner tensors; see ``DTensor``."""
        # A compiler's sizes may be plain tuples.
        size, stride = torch.Size(outer_size), tuple(outer_stride)
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, size, stride)
        return FlatDTensor(made._local_tensor, made._spec, requires_grad=made.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """Keep compiled functions out of on-disk caches.

        Their keys contain neither each rank's rows nor the contents of other DTensor arguments. Optimizer state of 4
        bits could be given to code that was compiled for FP32, and crash.
        """
        # Imported here because it takes seconds; a compiler that calls this has already imported it.
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        raise BypassAOTAutogradCache("the rows of a sharded tensor are those of one rank and one model")

    # The torch.distributed.checkpoint interface; rows of flattened dimensions are more than one box.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return the write items of this rank's part."""
        if not self.distribution.is_flattened:
            return super().__create_write_items__(fqn, object)  # type: ignore[no-any-return]  # torch leaves it untyped
        return write_items_of(fqn, self.distribution, self.shape, self._local_tensor)

    def __create_chunk_list__(self) -> list[Any]:
        """Return the positions of this rank's part in the whole tensor."""
        if not self.distribution.is_flattened:
            return super().__create_chunk_list__()  # type: ignore[no-any-return,no-untyped-call]  # as above
        return chunks_of(self.distribution, self.shape)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the piece of this rank's part at ``index``, as a view."""
        if not self.distribution.is_flattened:
            return super().__get_tensor_shard__(index)  # type: ignore[no-any-return,no-untyped-call]  # as above
        return shard_at(index.offset, self.distribution, self.shape, self._local_tensor)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Return the tensor under other placements on the same mesh; see ``DTensor.redistribute``.

        Raises:
            PlacementError: the mesh or a dtype changes, or the rows change while autograd records.
        """
        mesh = self._spec.mesh
        if (device_mesh is not None and device_mesh != mesh) or any(
            options.get(name) is not None for name in ("forward_dtype", "backward_dtype")
        ):
            raise PlacementError(
                f"a sharded tensor stays on its mesh {mesh} and keeps its dtype. fix: redistribute p.full_tensor()"
            )
        wanted = Distribution(mesh, tuple(placements or self._spec.placements))
        if repr(wanted.placements) == repr(self._spec.placements):
            return self
        whole = self.full_tensor()
        result = self.with_whole(whole.detach())
        if wanted.is_whole:
            return leave(whole, result)
        if not any(isinstance(placement, RaggedShard) for placement in wanted.placements):
            replicas = [Replicate() for _ in range(mesh.ndim)]
            return DTensor.from_local(whole, mesh, replicas, run_check=False).redistribute(mesh, wanted.placements)
        if whole.requires_grad:
            raise PlacementError(
                "no gradient flows from one division into rows to another. fix: redistribute under torch.no_grad()"
            )
        local = wanted.cut(whole).clone()
        stride = contiguous_stride(self.shape)
        return FlatDTensor.from_local(local, mesh, wanted.placements, run_check=False, shape=self.shape, stride=stride)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDTensor:
        """Copy the local part, ``.grad`` and attributes; the mesh and the placements are shared."""
        if id(self) in memo:
            copied: FlatDTensor = memo[id(self)]
            return copied
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_leaf:
                raise RuntimeError(
                    "only tensors created by the user (graph leaves) can be deep-copied. fix: copy tensor.detach()"
                )
            requires_grad, gradient = self.requires_grad, self.grad
        made = self.with_whole(self.whole().clone()) if self.window is not None else self.with_rows(
            self._local_tensor.clone()
        )  # fmt: skip
        memo[id(self)] = made
        made.requires_grad_(requires_grad)
        for name, value in vars(self).items():
            if name not in ("window", "is_unshared", *_OF_THIS_OBJECT):
                setattr(made, name, copy.deepcopy(value, memo))
        if gradient is not None:
            made.grad = copy.deepcopy(gradient, memo)
        return made

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes and slots to pickle, without those that belong to this object alone."""
        own = {name: value for name, value in vars(self).items() if name not in _OF_THIS_OBJECT}
        return own, {name: getattr(self, name) for name in DTensor.__slots__}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle only the local part; for a view through a window, pickle what it shows."""
        if self.window is not None:
            return self.with_whole(self.whole().clone()).__reduce_ex__(protocol)
        is_piece = self._local_tensor.untyped_storage().nbytes() > self._local_tensor.nbytes
        if is_piece and not isinstance(self, torch.nn.Parameter):
            return self.with_rows(self._local_tensor.clone()).__reduce_ex__(protocol)
        with torch._C.DisableTorchFunctionSubclass():
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it untyped


# DTensor is registered in the same way: optimizers choose foreach and fused variants by exact type.
for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if FlatDTensor not in _types:
        _types.append(FlatDTensor)
# Allows torch.load(weights_only=True) to read files of torch.save.
torch.serialization.add_safe_globals([FlatDTensor, RaggedShard, FlatRows])
