"""Flat buffers as DTensors: sharded tensors of their true shapes, which PyTorch's own tools work on unchanged.

A function of PyTorch that gets such a tensor asks it first (``__torch_function__``), and ``op_table`` says how it
runs: on the rows of each rank, on whole tensors, or as it is. See docs/design/facade.md.
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
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.dtensor.autograd import (
    convert_gradients_of,
    enter_local,
    enter_whole,
    is_recorded,
    leave,
    run_backward,
    run_gradients,
    run_recorded,
)
from dbuffer.dtensor.checkpoint_chunks import chunks_of, shard_at, write_items_of
from dbuffer.dtensor.distribution import Distribution, FlatRows, RaggedShard, contiguous_stride
from dbuffer.dtensor.elementwise_ops import run_by_rows, run_cast, run_factory, run_foreach, run_unscale
from dbuffer.dtensor.gathered_ops import Arguments, Options, run_on_whole, run_random_like, run_view
from dbuffer.dtensor.op_table import Kind, Operator, operator_of
from dbuffer.dtensor.parameter import ParameterTensor
from dbuffer.dtensor.placed_tensor import PlacedTensor
from dbuffer.dtensor.reduction_ops import run_foreach_norm, run_reduction
from dbuffer.errors import PlacementError

__all__ = ["FlatDTensor", "FlatRows", "RaggedShard", "rebind", "refuse_uses"]


_OF_THIS_OBJECT = ("on_grad_dropped", "gradient_of")


class FlatDTensor(ParameterTensor):
    """A DTensor whose rows lie where a flat buffer has them, through every operator.

    Element-wise functions, casts and new tensors of the same shape work on each rank's rows, and sums, means and norms
    need one all-reduce. Whatever else PyTorch has runs on whole tensors: right, but it gathers, and every rank of the
    mesh must call it. In-place functions write each rank's rows; random ones draw what the whole plain tensor would get
    from the same generator.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of PyTorch that got such a tensor."""
        handler = _HANDLERS.get(func) or _handler(func)
        if handler is _native:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        operator = _OPERATORS[func]
        # Optimizers call functions of each parameter, without autograd.
        if torch.is_grad_enabled() and operator.is_differentiable and is_recorded(args, kwargs or {}):
            return run_recorded(operator, args, kwargs or {})
        return handler(operator, args, kwargs or {})

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> FlatDTensor:
        """Make one from this rank's part; see ``DTensor.from_local``."""
        made = DTensor.from_local(local_tensor.detach(), device_mesh, placements, **options)
        result = FlatDTensor(made._local_tensor, made._spec, requires_grad=False)
        return leave(local_tensor, result) if is_recorded((local_tensor,), {}) else result  # type: ignore[return-value]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor, on all ranks of the mesh, which call it together."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        return enter_whole(self) if is_recorded((self,), {}) else self.whole()

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's part, which shares this tensor's memory."""
        if grad_placements is not None:
            return super().to_local(grad_placements=grad_placements)
        if is_recorded((self,), {}):
            return enter_local(self)
        local = self._local_tensor if self.window is None else self.whole()
        return local.view_as(local) if torch.is_grad_enabled() else local

    # What torch.compile asks of a tensor: DTensor's own methods make plain DTensors.

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> FlatDTensor:
        """Return the tensor over other inner tensors; see ``DTensor``."""
        # A compiler's sizes may be plain tuples.
        size, stride = torch.Size(outer_size), tuple(outer_stride)
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, size, stride)
        return FlatDTensor(made._local_tensor, made._spec, requires_grad=made.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """Keep compiled functions out of caches on disk.

        Their keys hold neither the rows of each rank nor what a DTensor beside this one is made of: optimizer state of
        4 bits would be given to code that was compiled for FP32, and crash.
        """
        # Takes seconds to import, and a compiler that asks has done so.
        from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

        raise BypassAOTAutogradCache("the rows of a sharded tensor are those of one rank and one model")

    # What torch.distributed.checkpoint asks of a tensor: rows of flattened dimensions are no single box.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return what this rank saves."""
        if not self.distribution.is_flattened:
            return super().__create_write_items__(fqn, object)  # type: ignore[no-any-return]  # torch leaves it untyped
        return write_items_of(fqn, self.distribution, self.shape, self._local_tensor)

    def __create_chunk_list__(self) -> list[Any]:
        """Return where this rank's part lies in the whole tensor."""
        if not self.distribution.is_flattened:
            return super().__create_chunk_list__()  # type: ignore[no-any-return,no-untyped-call]  # as above
        return chunks_of(self.distribution, self.shape)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the piece of this rank's part that the index names, as a view."""
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
            PlacementError: another mesh, or other rows while autograd records.
        """
        mesh = self._spec.mesh
        if (device_mesh is not None and device_mesh != mesh) or any(
            options.get(name) is not None for name in ("forward_dtype", "backward_dtype")
        ):
            raise PlacementError(f"a sharded tensor stays on its mesh {mesh} and keeps its dtype; use full_tensor()")
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
            raise PlacementError("no gradient flows from one division into rows to another; use torch.no_grad()")
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
                raise RuntimeError("only tensors created by the user (graph leaves) can be deep-copied; detach() first")
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
        """Return attributes and slots to pickle, but what belongs to this object alone."""
        own = {name: value for name, value in vars(self).items() if name not in _OF_THIS_OBJECT}
        return own, {name: getattr(self, name) for name in DTensor.__slots__}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the local part alone; of a view of other rows, what it shows."""
        if self.window is not None:
            return self.with_whole(self.whole().clone()).__reduce_ex__(protocol)
        is_piece = self._local_tensor.untyped_storage().nbytes() > self._local_tensor.nbytes
        if is_piece and not isinstance(self, torch.nn.Parameter):
            return self.with_rows(self._local_tensor.clone()).__reduce_ex__(protocol)
        with torch._C.DisableTorchFunctionSubclass():
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it untyped


# ---------------------------------------------------------------- how each function runs

Handler = Callable[[Operator, Arguments, Options], Any]


def _native(operator: Operator, args: Arguments, options: Options) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return operator.function(*args, **options)


def _detach(operator: Operator, args: Arguments, options: Options) -> Any:
    source = args[0]
    if source.is_unshared:
        source.is_unshared = False
    detached = source.with_local(source._local_tensor.detach())
    if source.window is not None:
        detached.window = source.window
    return detached


def _set_data(operator: Operator, args: Arguments, options: Options) -> None:
    # A sharded tensor's memory is a piece of a flat buffer, so it takes over the values.
    target, value = args
    if not isinstance(target, PlacedTensor):
        raise PlacementError("the values of a plain tensor cannot be those of a sharded one; use p.full_tensor()")
    if value.shape != target.shape or value.dtype != target.dtype or value.device != target.device:
        raise PlacementError(
            f".data of a sharded tensor is {target.dtype} of shape {tuple(target.shape)} on {target.device}; found "
            f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        )
    with torch.no_grad():
        target.copy_(value.detach())


_REASONS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def refuse_uses(tensor: torch.Tensor, *, hook: Callable[[], str], convert: Callable[[], str]) -> None:
    """Let two uses of a tensor raise ``PlacementError`` with a reason.

    Args:
        hook: of ``register_hook``, as autograd gives the tensor no gradient.
        convert: of ``nn.Module.to`` and its like, by the module that holds it.
    """
    _REASONS[tensor] = (hook, convert)


def _convert(operator: Operator, args: Arguments, options: Options) -> Any:
    # Module._apply asks of each parameter, and would go on to exchange the objects.
    if args[0] in _REASONS:
        _, reason = _REASONS[args[0]]
        raise PlacementError(reason())
    return _native(operator, args, options)


def _hook(operator: Operator, args: Arguments, options: Options) -> Any:
    tensor, *rest = args
    if operator.name == "register_hook" and tensor in _REASONS:
        reason, _ = _REASONS[tensor]
        raise PlacementError(reason())
    convert_gradients_of(tensor)
    if operator.name == "retain_grad" and not tensor.is_leaf:
        raise PlacementError(
            "retain_grad would keep a gradient that forgets the rows of each rank; use register_hook and keep what it "
            "gets"
        )
    awake = [_awake(item) if callable(item) else item for item in rest]
    named = {name: _awake(item) if callable(item) else item for name, item in options.items()}
    with torch._C.DisableTorchFunctionSubclass():
        return operator.function(tensor, *awake, **named)


def _awake(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook in which sharded tensors are asked, whoever started backward."""

    def call(*args: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return hook(*args)

    return call


def _iterate(operator: Operator, args: Arguments, options: Options) -> Any:
    return iter(args[0].unbind(0))


def _reshape(operator: Operator, args: Arguments, options: Options) -> Any:
    target = args[0]
    is_replaceable = isinstance(target, PlacedTensor) and (target.is_whole or target.is_unshared)
    if not is_replaceable or target.window is not None:
        return _refuse(operator, args, options)
    rebind(target, target.with_whole(operator.function(target.whole(), *args[1:], **options)))
    return target


def rebind(target: PlacedTensor, source: PlacedTensor) -> None:
    """Make one tensor what another is, in shape, dtype, rows and memory; it stays the same object for its users."""
    target._spec, target._local_tensor = source._spec, source._local_tensor
    with torch._C.DisableTorchFunctionSubclass():
        # What PyTorch itself knows of the shape.
        target.data = source


def _refuse(operator: Operator, args: Arguments, options: Options) -> Any:
    raise PlacementError(
        f"{operator.name} cannot be right on a sharded tensor, whose memory is a piece of a flat buffer; work on "
        "p.to_local(), this rank's rows, or on p.full_tensor(), a whole copy"
    )


_RUN: dict[Kind, Handler] = {
    Kind.NATIVE: _native,
    Kind.DETACH: _detach,
    Kind.ROWS: run_by_rows,
    Kind.LIKE: run_by_rows,
    Kind.CAST: run_cast,
    Kind.FOREACH: run_foreach,
    Kind.FOREACH_NORM: run_foreach_norm,
    Kind.UNSCALE: run_unscale,
    Kind.REDUCE: run_reduction,
    Kind.VIEW: run_view,
    Kind.FACTORY: run_factory,
    Kind.RANDOM: run_on_whole,
    Kind.RANDOM_LIKE: run_random_like,
    Kind.WHOLE: run_on_whole,
    Kind.HOOK: _hook,
    Kind.BACKWARD: run_backward,
    Kind.GRADIENTS: run_gradients,
    Kind.SET_DATA: _set_data,
    Kind.CONVERT: _convert,
    Kind.ITERATE: _iterate,
    Kind.RESHAPE: _reshape,
    Kind.REFUSED: _refuse,
}
_HANDLERS: dict[Callable[..., Any], Handler] = {}
_OPERATORS: dict[Callable[..., Any], Operator] = {}


def _handler(function: Callable[..., Any]) -> Handler:
    operator = operator_of(function)
    _OPERATORS[function] = operator
    _HANDLERS[function] = _RUN[operator.kind]
    return _HANDLERS[function]


# As DTensor itself does: optimizers choose foreach and fused variants by exact type.
for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if FlatDTensor not in _types:
        _types.append(FlatDTensor)
# So that torch.load(weights_only=True) reads what torch.save wrote.
torch.serialization.add_safe_globals([FlatDTensor, RaggedShard, FlatRows])
