"""What kind of function each function of PyTorch is, for the rows of a sharded tensor; the kinds decide how it runs."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Kind", "Operator", "operator_of"]


class Kind(enum.Enum):
    """How a function runs: what is not known to be otherwise runs on whole tensors."""

    NATIVE = "asks or sets what PyTorch itself knows of the tensor"
    DETACH = "the same memory, without history"
    ROWS = "each element of the result needs the elements at its place"
    LIKE = "a new tensor of the same shape"
    CAST = "another dtype or device"
    FOREACH = "element-wise over lists of tensors"
    FOREACH_NORM = "one norm per tensor of a list"
    UNSCALE = "the check of a gradient scaler"
    REDUCE = "sums, means, norms, extremes"
    VIEW = "other shape, same memory"
    FACTORY = "a new tensor of any shape"
    RANDOM = "overwrites the tensor, as a whole tensor would be"
    RANDOM_LIKE = "a new random tensor of the same shape"
    WHOLE = "anything else"
    HOOK = "calls back during backward"
    BACKWARD = "starts backward"
    GRADIENTS = "returns gradients of some tensors"
    SET_DATA = "replaces the values"
    CONVERT = "asked by a module that converts its parameters"
    ITERATE = "an iterator"
    RESHAPE = "other shape in place"
    REFUSED = "wrong on a sharded tensor, whatever one does"


@dataclass(frozen=True, slots=True)
class Operator:
    """One function.

    Attributes:
        name: without the marks of a dunder or an in-place function. is_in_place: whether it writes into its first
            argument. is_differentiable: whether autograd may have to record it.
    """

    function: Callable[..., Any]
    kind: Kind
    name: str
    is_in_place: bool = False
    is_differentiable: bool = False


_DIFFERENTIABLE = frozenset(
    {Kind.ROWS, Kind.CAST, Kind.FOREACH, Kind.FOREACH_NORM, Kind.REDUCE, Kind.VIEW, Kind.RANDOM, Kind.WHOLE}
)
# Element-wise whatever the overload; each has an in-place variant of the same name and an underscore, or none.
_ELEMENT_WISE = frozenset(
    """abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh
    atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu
    clamp clamp_max clamp_min clip clone conj conj_physical contiguous copy copysign cos cosh deg2rad digamma div divide
    elu eq erf erfc erfinv exp exp2 expm1 fill fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu
    greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac imag isclose
    isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid log_sigmoid lt masked_fill
    maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polygamma positive pow
    rad2deg real reciprocal relu relu6 remainder resolve_conj resolve_neg round rsqrt rsub selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide
    trunc where xlogy zero alias lift_fresh record_stream and or xor lshift rshift""".split()
)
# Dunders by what stands between the underscores; "i" and "r" in front are the in-place and the reflected one.
_DUNDERS = frozenset("add sub mul div truediv floordiv mod pow and or xor lshift rshift".split())
_COMPARISONS = frozenset("eq ne lt le gt ge neg pos abs invert".split())

_CASTS = frozenset(
    """to type type_as float double half bfloat16 int long short char byte bool cfloat cdouble cpu cuda xpu
    _to_copy""".split()
)
_LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "full_like"})
_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_RANDOM = frozenset(
    """uniform_ normal_ exponential_ cauchy_ log_normal_ geometric_ random_ bernoulli_ kaiming_uniform_ kaiming_normal_
    xavier_uniform_ xavier_normal_ trunc_normal_ constant_""".split()
)
_FACTORIES = frozenset({"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"})
_REDUCTIONS = frozenset(
    """sum mean amax amin max min any all norm vector_norm linalg_vector_norm prod logsumexp softmax log_softmax cumsum
    cumprod argmax argmin""".split()
)
_VIEWS = frozenset(
    """__getitem__ select slice narrow view view_as reshape reshape_as _unsafe_view flatten unflatten ravel transpose t
    swapaxes swapdims permute movedim moveaxis squeeze unsqueeze expand expand_as chunk split split_with_sizes
    tensor_split hsplit vsplit dsplit unbind diagonal unfold as_strided broadcast_to T mT H mH adjoint""".split()
)
_NATIVE = frozenset(
    """size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex is_signed
    is_inference is_conj is_neg is_same_size get_device data_ptr storage untyped_storage _typed_storage storage_offset
    storage_type is_shared is_pinned requires_grad_ detach_ __repr__ __format__ __reduce_ex__ __reduce__ __setstate__
    __hash__ __len__ __dir__ _is_view result_type _use_count has_names
    _clear_non_serializable_cached_data numpy __array__ is_set_to
    sym_size sym_stride sym_numel sym_storage_offset""".split()
)
_RESHAPES = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"})
_REFUSED = frozenset(
    {"resize_", "resize_as_", "as_strided_", "share_memory_", "pin_memory", "__dlpack__", "module_load"}
)
_SPECIAL = {
    "detach": Kind.DETACH,
    "register_hook": Kind.HOOK,
    "register_post_accumulate_grad_hook": Kind.HOOK,
    "retain_grad": Kind.HOOK,
    "backward": Kind.BACKWARD,
    "__iter__": Kind.ITERATE,
    "_has_compatible_shallow_copy_type": Kind.CONVERT,
    "_foreach_norm": Kind.FOREACH_NORM,
    "_foreach_max": Kind.WHOLE,
    "_foreach_powsum": Kind.WHOLE,
    "_amp_foreach_non_finite_check_and_unscale_": Kind.UNSCALE,
}
_TABLES: tuple[tuple[frozenset[str], Kind], ...] = (
    (_ELEMENT_WISE, Kind.ROWS),
    (_CASTS, Kind.CAST),
    (_LIKE, Kind.LIKE),
    (_RANDOM_LIKE, Kind.RANDOM_LIKE),
    (_RANDOM, Kind.RANDOM),
    (_FACTORIES, Kind.FACTORY),
    (_REDUCTIONS, Kind.REDUCE),
    (_VIEWS, Kind.VIEW),
    (_NATIVE, Kind.NATIVE),
    (_RESHAPES, Kind.RESHAPE),
    (_REFUSED, Kind.REFUSED),
)


def operator_of(function: Callable[..., Any]) -> Operator:
    """Return what a function that PyTorch hands to ``__torch_function__`` is."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _property_access(function, name)
    schema = getattr(function, "_schema", None)
    if schema is not None:
        # torch.ops.aten.add_.Tensor and its like.
        name = schema.name.rpartition("::")[2]
    if function is torch.autograd.grad:
        return Operator(function, Kind.GRADIENTS, name)
    if name == "grad":
        return Operator(function, Kind.NATIVE, name)
    base, is_in_place = _stem(name)
    kind = _kind(name, base, is_in_place)
    # The functions of torch.nn.init see to it themselves that autograd does not record.
    is_recorded = kind in _DIFFERENTIABLE and getattr(function, "__module__", "") != "torch.nn.init"
    return Operator(function, kind, base, is_in_place or name == "__setitem__", is_recorded)


def _property_access(function: Callable[..., Any], access: str) -> Operator:
    attribute = function.__self__  # type: ignore[attr-defined]  # a bound method of the property
    name = getattr(attribute, "__name__", None) or attribute.fget.__name__
    kind = Kind.NATIVE
    if access == "__get__":
        kind = {"data": Kind.DETACH, "real": Kind.ROWS, "imag": Kind.ROWS}.get(name, kind)
        kind = Kind.VIEW if name in _VIEWS else kind
    elif name == "data":
        kind = Kind.SET_DATA
    return Operator(function, kind, name, is_differentiable=kind in _DIFFERENTIABLE)


def _stem(name: str) -> tuple[str, bool]:
    """Return the name without what marks a dunder or an in-place function, and whether it is in place."""
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        if inner in _COMPARISONS or inner in _DUNDERS:
            return {"invert": "bitwise_not", "pos": "positive"}.get(inner, _PLAIN.get(inner, inner)), False
        if inner[1:] in _DUNDERS and inner[0] in "ir":
            return _PLAIN.get(inner[1:], inner[1:]), inner[0] == "i"
        return name, False
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1], True
    return name, False


_PLAIN = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}


def _kind(name: str, base: str, is_in_place: bool) -> Kind:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name.startswith(("_foreach_", "_fused_")):
        return Kind.FOREACH
    for table, kind in _TABLES:
        if name in table or (kind is Kind.ROWS and base in table):
            return kind
    return Kind.WHOLE
