"""Table of how each PyTorch function runs on a sharded tensor. Functions not listed run on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbuffer.dtensor.attribute_ops import (
    refuse,
    refuse_collective,
    run_convert,
    run_data_ptr,
    run_detach,
    run_get_data,
    run_hook,
    run_iterate,
    run_native,
    run_numbers,
    run_reshape,
    run_set_data,
)
from dbuffer.dtensor.autograd import run_backward
from dbuffer.dtensor.elementwise_ops import (
    run_by_rows,
    run_cast,
    run_component,
    run_factory,
    run_foreach,
    run_random_like,
    run_unscale,
)
from dbuffer.dtensor.gathered_ops import Arguments, Operator, Options, run_on_whole
from dbuffer.dtensor.reduction_ops import run_foreach_norm, run_reduction

Handler = Callable[[Operator, Arguments, Options], Any]

OPERATORS: dict[Callable[..., Any], Operator] = {}
"""Operators looked up so far."""

_DIFFERENTIABLE = (run_by_rows, run_cast, run_component, run_foreach, run_foreach_norm, run_reduction, run_on_whole)
# Element-wise in every overload. Each has an in-place variant with a trailing underscore, or none.
_ELEMENT_WISE = frozenset(
    """abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh
    atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu
    clamp clamp_max clamp_min clip clone conj conj_physical contiguous copy copysign cos cosh deg2rad digamma div divide
    elu eq erf erfc erfinv exp exp2 expm1 fill fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu
    greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose
    isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid log_sigmoid lt masked_fill
    maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polygamma positive pow
    rad2deg reciprocal relu relu6 remainder resolve_conj resolve_neg round rsqrt rsub selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide
    trunc where xlogy zero alias lift_fresh record_stream and or xor lshift rshift""".split()
)
# Names of dunder methods without underscores. A leading "i" marks the in-place variant, "r" the reflected one.
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
_NATIVE = frozenset(
    """size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex is_signed
    is_inference is_conj is_neg is_same_size get_device storage untyped_storage _typed_storage storage_offset
    storage_type is_shared is_pinned requires_grad_ detach_ __repr__ __reduce_ex__ __reduce__ __setstate__
    __hash__ __len__ __dir__ _is_view result_type _use_count has_names
    _clear_non_serializable_cached_data is_set_to
    sym_size sym_stride sym_numel sym_storage_offset""".split()
)
_RESHAPES = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"})
_REFUSED = frozenset(
    {"resize_", "resize_as_", "as_strided_", "share_memory_", "pin_memory", "__dlpack__", "module_load"}
)
_SPECIAL: dict[str, Handler] = {
    "data_ptr": run_data_ptr,
    "detach": run_detach,
    "register_hook": run_hook,
    "register_post_accumulate_grad_hook": run_hook,
    "retain_grad": run_hook,
    "backward": run_backward,
    "__format__": run_numbers,
    "numpy": run_numbers,
    "__array__": run_numbers,
    "grad": run_native,
    "real": run_component,
    "imag": run_component,
    "__iter__": run_iterate,
    "_has_compatible_shallow_copy_type": run_convert,
    "_foreach_norm": run_foreach_norm,
    "_foreach_max": run_on_whole,
    "_foreach_powsum": run_on_whole,
    "_amp_foreach_non_finite_check_and_unscale_": run_unscale,
}
_TABLES: tuple[tuple[frozenset[str], Handler], ...] = (
    (_CASTS, run_cast),
    (_LIKE, run_by_rows),
    (_RANDOM_LIKE, run_random_like),
    (_FACTORIES, run_factory),
    (_REDUCTIONS, run_reduction),
    (_NATIVE, run_native),
    (_RESHAPES, run_reshape),
    (_REFUSED, refuse),
)


def operator_of(function: Callable[..., Any]) -> Operator:
    """Return how to run a function that PyTorch passes to ``__torch_function__``."""
    if function not in OPERATORS:
        OPERATORS[function] = _operator_of(function)
    return OPERATORS[function]


def _operator_of(function: Callable[..., Any]) -> Operator:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return _property_access(function, name)
    schema = getattr(function, "_schema", None)
    if schema is not None:
        # An overload such as torch.ops.aten.add_.Tensor.
        name = schema.name.rpartition("::")[2]
    if _is_collective(function):
        return Operator(function, refuse_collective, name)
    base, is_in_place = _stem(name)
    run = run_backward if function is torch.autograd.grad else _handler(name, base)
    # The functions of torch.nn.init disable autograd themselves.
    is_recorded = (
        run in _DIFFERENTIABLE and name not in _LIKE and getattr(function, "__module__", "") != "torch.nn.init"
    )
    is_changing, is_element_wise = is_in_place or name == "__setitem__", base in _ELEMENT_WISE
    return Operator(function, run, base, is_changing, name in _RANDOM, is_recorded, is_element_wise)


def _is_collective(function: Callable[..., Any]) -> bool:
    """Return whether a function communicates: a function of ``torch.distributed``, or a c10d operator."""
    schema = getattr(function, "_schema", None)
    # An overload of an operator has a schema; the whole operator has a qualified name.
    operator = getattr(function, "_qualified_op_name", "") if schema is None else schema.name
    if operator:
        return operator.partition("::")[0] in _COLLECTIVE_NAMESPACES
    module = getattr(function, "__module__", None) or ""
    return module.startswith(_COLLECTIVE_MODULES)


_COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_COLLECTIVE_MODULES = (
    "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives", "torch.distributed.nn"
)  # fmt: skip


def _property_access(function: Callable[..., Any], access: str) -> Operator:
    attribute = function.__self__  # type: ignore[attr-defined]  # a bound method of the property
    name = getattr(attribute, "__name__", None) or attribute.fget.__name__
    run: Handler = run_native
    if access == "__get__":
        run = {"data": run_get_data, "real": run_component, "imag": run_component}.get(name, run)
        run = run_on_whole if name in ("T", "mT", "H", "mH") else run
    elif name == "data":
        run = run_set_data
    return Operator(function, run, name, is_differentiable=run in _DIFFERENTIABLE)


def _stem(name: str) -> tuple[str, bool]:
    """Return the name without the underscores of a dunder or an in-place function, and whether it is in place."""
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


def _handler(name: str, base: str) -> Handler:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name.startswith(("_foreach_", "_fused_")):
        return run_foreach
    if base in _ELEMENT_WISE:
        return run_by_rows
    return next((run for names, run in _TABLES if name in names), run_on_whole)
