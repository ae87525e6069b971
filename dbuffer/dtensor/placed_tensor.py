"""PlacedTensor: a sharded tensor without operators: local part, placements, and access to the whole.

The files of operators use this class. ``FlatDTensor``, its only heir, calls the operators and stands above their files;
one class for both would need those files and would be needed by them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.dtensor.distribution import Distribution, contiguous_stride
from dbuffer.errors import PlacementError

AnyPlaced = TypeVar("AnyPlaced", bound="PlacedTensor")

_REQUIRES_GRAD: Any = torch._C.TensorBase.requires_grad
_GRAD: Any = torch.Tensor.grad
_get_grad, _set_grad = _GRAD.__get__, _GRAD.__set__
# Calls a function without the overrides of subclasses; faster than disabling and enabling them.
_plainly: Any = torch._C._disabled_torch_function_impl


class Tally:
    """A number that several modules count up and compare."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


REQUIRES_GRAD_WRITES = Tally()
"""How often ``requires_grad`` of any sharded or gathered parameter was set. Code that looks for changes compares it."""


@dataclass(frozen=True, slots=True)
class Window:
    """The elements of a view that does not follow the ranks' rows; each use gathers ``base``.

    Attributes:
        base: the tensor that was viewed. size, stride, offset: the view into the contiguous whole, in elements.
    """

    base: PlacedTensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of ``whole``, the gathered ``base``."""
        return whole.as_strided(self.size, self.stride, self.offset)


class GradDrops:
    """Calls a function when Python code sets ``.grad`` to None on one of the tensors that share this object.

    Attributes:
        last: call the function only for this tensor; None: for any tensor.
    """

    __slots__ = ("function", "last")

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.last: weakref.ref[torch.Tensor] | None = None


class PlacedTensor(DTensor):
    """A DTensor with a local part, as operators see it.

    Optimizers read shape, dtype, dimensions and ``.grad`` of all parameters in every step. These are answered in
    Python, because through PyTorch each would cost as much as an operator.

    Attributes:
        window: set for a view that does not follow this rank's rows; the local part is then a copy.
        is_unshared: whether the memory is new and no other tensor uses it, so that it may be replaced.
        has_exact_norms: whether norms are computed from the gathered whole, with the same bits for any sharding.
        on_grad_dropped: called when Python code sets ``.grad`` to None.
        pending_grad: what ``.grad`` returns instead of its real value, until it is set.
        gradient_of: the parameter whose ``.grad`` this is, if its memory also receives that parameter's next gradients.
            Assigning this tensor to ``.grad`` of another parameter copies it.
    """

    window: Window | None = None
    is_unshared: bool = False
    has_exact_norms: bool = False
    on_grad_dropped: GradDrops | None = None
    pending_grad: torch.Tensor | None = None
    gradient_of: weakref.ref[torch.Tensor] | None = None

    if not TYPE_CHECKING:
        # Taken before ``made_by_hand`` replaces DTensor's ``__new__``.
        __new__ = DTensor.__new__

    def __init__(self, *args: Any, **options: Any) -> None:
        """Do nothing, because DTensor's own costs as much as an operator."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return _meta(self).shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dimensions."""
        return len(_meta(self).shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the elements."""
        return _meta(self).dtype

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes a gradient; overridden to count changes."""
        with torch._C.DisableTorchFunctionSubclass():
            flag: bool = _REQUIRES_GRAD.__get__(self)
            return flag

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        REQUIRES_GRAD_WRITES.number += 1
        with torch._C.DisableTorchFunctionSubclass():
            _REQUIRES_GRAD.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, or ``pending_grad`` while that is set."""
        if self.pending_grad is not None:
            return self.pending_grad
        gradient: torch.Tensor | None = _plainly(_get_grad, (), (self,))
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and (owner := getattr(value, "gradient_of", None)) and owner() is not self:
            value = value.clone()
        _plainly(_set_grad, (), (self, value))
        if self.pending_grad is not None:
            self.pending_grad = None
        drops = self.on_grad_dropped
        if value is None and drops is not None and (drops.last is None or drops.last() is self):
            drops.function()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def requires_grad_(self: AnyPlaced, requires_grad: bool = True) -> AnyPlaced:
        """As of any tensor."""
        self.requires_grad = requires_grad
        return self

    @property
    def distribution(self) -> Distribution:
        """How the elements are distributed over the mesh."""
        return Distribution(self._spec.mesh, self._spec.placements)

    @property
    def is_whole(self) -> bool:
        """True if every rank can see all elements: they are replicated, or this is a view through a window."""
        return all(placement.is_replicate() for placement in self._spec.placements)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, unrecorded by autograd; all ranks call it. It may share this tensor's memory."""
        if self.window is not None:
            return self.window.of(self.window.base.whole())
        return self.distribution.gather(self._local_tensor, self.shape, self)

    def with_local(self: AnyPlaced, local: torch.Tensor) -> AnyPlaced:
        """Return a tensor of the same class, global shape and rows with another local part, of any dtype."""
        spec = self._spec
        if local.dtype is not self.dtype:
            spec = _respecified(spec, TensorMeta(self.shape, _meta(self).stride, local.dtype))
        return type(self)(local, spec, requires_grad=False)

    def with_rows(self: AnyPlaced, local: torch.Tensor) -> AnyPlaced:
        """Return a tensor whose local part has the same rows as this tensor's, but may have other columns and dtype."""
        if not local.is_contiguous():
            local = local.contiguous()
        meta, shape = _meta(self), local.shape
        is_alike = shape == self._local_tensor.shape
        shape = meta.shape if is_alike else torch.Size((meta.shape[0], *shape[1:]))
        stride = contiguous_stride(shape)
        if shape == meta.shape and stride == meta.stride and local.dtype is meta.dtype:
            return type(self)(local, self._spec, requires_grad=False)
        return type(self)(local, _respecified(self._spec, TensorMeta(shape, stride, local.dtype)), requires_grad=False)

    def with_whole(self: AnyPlaced, whole: torch.Tensor) -> AnyPlaced:
        """Return a tensor that is replicated on the same mesh."""
        mesh = self._spec.mesh
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, tuple(Replicate() for _ in range(mesh.ndim)), tensor_meta=meta)
        return type(self)(whole, spec, requires_grad=False)


def keep_from_dynamo(accessor: property) -> None:
    """Make compiled code break its graph at a property and run it uncompiled, because Dynamo cannot trace it."""
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for function in (accessor.fget, accessor.fset):
        any_function: Any = function
        any_function._torchdynamo_disable = True
        frames.set_code_exec_strategy(any_function.__code__, strategy)


for _accessor in ("requires_grad", "grad"):
    keep_from_dynamo(PlacedTensor.__dict__[_accessor])


def _meta(tensor: DTensor) -> TensorMeta:
    return cast(TensorMeta, tensor._spec.tensor_meta)


def _respecified(spec: DTensorSpec, meta: TensorMeta) -> DTensorSpec:
    # A copy avoids recomputing what __post_init__ derives from the placements.
    changed = copy.copy(spec)
    changed.tensor_meta = meta
    return changed


def is_laid_out_like(tensor: DTensor, reference: DTensor) -> bool:
    """Return whether the local parts of two tensors with equal numbers of rows hold the same rows."""
    mine, theirs = tensor._spec, reference._spec
    if mine is theirs:
        return True
    if mine.mesh is not theirs.mesh and mine.mesh != theirs.mesh:
        return False
    # A RaggedShard compares equal to a plain Shard(0), which does not have its rows.
    return all(
        one is other or (type(one) is type(other) and one == other)
        for one, other in zip(mine.placements, theirs.placements, strict=True)
    )


def whole_of(tensor: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """Return an operand as one whole plain tensor, unrecorded by autograd.

    Args:
        beside: the sharded operand of the same call, for the message.
    Raises:
        PlacementError: the tensor is plain and has more than one element. The values may differ between ranks, unless
            PyTorch's ``implicit_replication`` is on.
    """
    if isinstance(tensor, PlacedTensor):
        return tensor.whole()
    if isinstance(tensor, DTensor):
        is_whole = all(placement.is_replicate() for placement in tensor.placements)
        return tensor._local_tensor if is_whole else tensor.detach().full_tensor()  # type: ignore[attr-defined]  # torch's stub
    if tensor.numel() == 1 or is_replication_implied():
        return tensor
    raise PlacementError(
        f"found a plain tensor of shape {tuple(tensor.shape)} beside a sharded one, {words_of(beside)}. fix: if every "
        "rank holds the same values, say so: DTensor.from_local(tensor, p.device_mesh, [Replicate()] * "
        "p.device_mesh.ndim), or for all plain tensors torch.distributed.tensor.experimental.implicit_replication(). "
        "If they are this rank's rows, use p.to_local(); this rank's own data, use p.full_tensor(). Call prune.remove, "
        "remove_parametrizations and remove_weight_norm before fully_shard."
    )


# ---------------------------------------------------------------- names of tensors in messages


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a sharded tensor in messages, and the dtype its owner computes in.

    Attributes:
        words: returns the tensor's name and its owner. fix: what the user should do to use it outside its unit.
        compute_dtype: dtype of the copy that the owner computes with.
    """

    words: Callable[[], str]
    fix: str
    compute_dtype: torch.dtype


_LABELS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def label(tensor: torch.Tensor, named: Label) -> None:
    """Set the name of a sharded tensor for messages."""
    _LABELS[tensor] = named


def label_of(tensor: torch.Tensor | None) -> Label | None:
    """Return the label of a sharded tensor, or of the tensor that it is a view of; None if there is none."""
    if not isinstance(tensor, PlacedTensor):
        return None
    found: Label | None = _LABELS.get(tensor)
    if found is None and tensor.window is not None:
        found = label_of(tensor.window.base)
    return found


def words_of(tensor: torch.Tensor | None) -> str:
    """Return a description of a tensor for messages."""
    owner = None if tensor is None else getattr(tensor, "gradient_of", None)
    if owner is not None and (named := label_of(owner())) is not None:
        return f"the gradient of {named.words()}"
    named = label_of(tensor)
    if named is not None:
        return named.words()
    if not isinstance(tensor, DTensor):
        return "which has no name"
    # A tensor that was read from .data has the memory of its parameter; without rows, its layout.
    memory = tensor._local_tensor
    for known, named in _LABELS.items():
        if known._local_tensor.data_ptr() == memory.data_ptr() if memory.numel() else known._spec is tensor._spec:
            return str(named.words())
    return f"which was computed from sharded ones and has shape {tuple(tensor.shape)}"


def is_replication_implied() -> bool:
    """Return whether plain tensors count as equal on all ranks (PyTorch's ``implicit_replication``)."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)
