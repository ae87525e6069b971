"""The parameters that a unit owns, and the places in its modules that use each of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp.build.extension import Extension, extension_of
from megatron_fsdp.build.no_shard import is_no_shard
from megatron_fsdp.build.tensor_parallel import TensorParallel, tensor_parallel_of
from megatron_fsdp.errors import ConfigError, OwnershipError
from megatron_fsdp.policy.mesh import ShardingTarget
from megatron_fsdp.policy.precision import GradDtype, GroupDtypes, MixedPrecisionPolicy, grad_dtype_of

__all__ = [
    "OwnedParameter", "ParamModuleInfo", "collect_parameters", "is_ignored", "mark_ignored", "mark_owned",
    "owned_name", "owner_words", "settle_grad_dtypes",
]  # fmt: skip

# The sharded parameters of all units, and their originals, with the unit's name and the parameter's name in it. A tied
# weight that is still registered elsewhere is found here.
_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()

_IGNORED: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PLACES_OF_IGNORED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class ParamModuleInfo:
    """A place where a parameter is registered; it does not keep the module alive."""

    __slots__ = ("_module", "attribute")

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module, self.attribute = weakref.ref(module), attribute

    @property
    def module(self) -> nn.Module:
        """The module."""
        module = self._module()
        assert module is not None
        return module


@dataclass(slots=True, eq=False)
class OwnedParameter:
    """A parameter of a unit.

    Attributes:
        name: the first name within the unit.
        param_module_infos: every place where it is registered (several when it is tied).
        tensor_parallel: how it is sharded over axes that are not data-parallel; None for a plain parameter.
        is_replicated: it stays whole on every rank (``fsdp_no_shard``).
        policy: its mixed precision. grad_dtype: the attribute of that name, as the user set it.
        extension: of a subclass with its own all-gather; None for any other.
        kind: its class, if it is a subclass of ``nn.Parameter`` that the sharded parameter has to keep.
        memory: its memory before sharding (``shared_memory.Memory``); None if it had none.
    """

    name: str
    parameter: nn.Parameter
    tensor_parallel: TensorParallel | None = None
    is_replicated: bool = False
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009  # frozen
    grad_dtype: GradDtype = "own"
    extension: Extension | None = None
    kind: type[nn.Parameter] | None = None
    memory: Any = None
    param_module_infos: list[ParamModuleInfo] = field(default_factory=list)

    @property
    def local_tensor(self) -> torch.Tensor:
        """This rank's part along axes that are not data-parallel, which the buffers lay out."""
        if self.extension is not None:
            return self.extension.data
        return self.parameter.to_local() if isinstance(self.parameter, DTensor) else self.parameter.data

    def dtypes_for(self, own: torch.dtype, *, requires_grad: bool) -> GroupDtypes:
        """Return the dtypes of its copies if its own dtype is ``own``."""
        return self.policy.dtypes_for(own, requires_grad=requires_grad, grad_dtype=self.grad_dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``local_tensor``; the parameter's own shape, unless ``tensor_parallel`` is set."""
        return tuple(self.local_tensor.shape)


def collect_parameters(
    modules: Sequence[nn.Module],
    ignored: Iterable[nn.Parameter],
    target: ShardingTarget | None = None,
) -> list[OwnedParameter]:
    """Return the parameters below ``modules`` that no nested unit owns, in registration order.

    Args:
        modules: of one unit. target: the mesh to shard over; None if no parameter is a DTensor.
        ignored: parameters that are not sharded.
    Raises:
        OwnershipError: a parameter belongs to another unit already.
        ConfigError: a parameter that cannot be sharded (0-d, lazy, a DTensor over the data-parallel axes).
    """
    skipped = {id(parameter) for parameter in ignored}
    found: dict[int, OwnedParameter] = {}
    for position, root in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        nested = {below for below in root.modules() if below is not root and "_fsdp_unit" in vars(below)}
        for path, module in root.named_modules(memo=nested):
            for attribute, parameter in module._parameters.items():
                if parameter is None or id(parameter) in skipped:
                    continue
                if id(parameter) not in found:
                    name = f"{prefix}{path}.{attribute}" if path else prefix + attribute
                    _check_parameter(name, parameter, root)
                    _check_module(name, module, root)
                    owned = OwnedParameter(name, parameter, tensor_parallel_of(name, parameter, target))
                    owned.is_replicated = is_no_shard(module) or is_no_shard(parameter)
                    if target is not None:
                        owned.extension = extension_of(name, parameter, target.num_weight_shards)
                    if owned.extension is None:
                        owned.kind = _kind_of(name, parameter, root)
                    found[id(parameter)] = owned
                found[id(parameter)].param_module_infos.append(ParamModuleInfo(module, attribute))
    return list(found.values())


def settle_grad_dtypes(
    owned: Sequence[OwnedParameter], policy: MixedPrecisionPolicy, now: Sequence[nn.Parameter]
) -> None:
    """Read the ``grad_dtype`` of a unit's parameters, and choose the common reduce dtype.

    Args:
        policy: the unit's. now: each parameter itself, or the sharded one that stands for it.
    """
    for each, parameter in zip(owned, now, strict=True):
        each.grad_dtype = grad_dtype_of(parameter)
    trained = [(one.dtype, each.grad_dtype) for each, one in zip(owned, now, strict=True) if one.requires_grad]
    common = policy.common_reduce_dtype(trained)
    for each in owned:
        each.policy = replace(each.policy, reduce_dtype=common)


def _check_parameter(name: str, parameter: nn.Parameter, root: nn.Module) -> None:
    where = f"{type(root).__name__}: parameter {name!r}"
    if is_lazy(parameter):
        raise ConfigError(
            f"{where} is of a lazy module, which gives it a shape in its first forward. fix: before fully_shard, on "
            "every rank: with torch.no_grad(): model(batch), with real data or zeros of the same shape"
        )
    if parameter in _OWNERS:
        unit, first_name = _OWNERS[parameter]
        if isinstance(parameter, DTensor):
            raise OwnershipError(
                f"{where} belongs to unit {unit!r} already, which was sharded before. fix: call fully_shard on "
                "children first, then on their parents"
            )
        raise OwnershipError(
            f"{where} is the same tensor as {first_name!r} of unit {unit!r}, which owns it already. Tied parameters "
            "need one unit. fix: pass both modules to one call, fully_shard([first, second]), or wrap neither and "
            "leave both to the unit around them"
        )
    if parameter.ndim == 0:
        raise ConfigError(
            f"{where} has no dimensions, so there are no rows to shard. fix: make it 1-d, "
            "nn.Parameter(torch.tensor([value])), or list it in ignored_params"
        )
    if parameter.is_complex():
        raise ConfigError(
            f"{where} is complex ({parameter.dtype}), and gradients are reduced as real numbers. fix: store real "
            "numbers, nn.Parameter(torch.view_as_real(tensor)), with torch.view_as_complex in forward; or list it in "
            "ignored_params, and reduce its gradient yourself"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"{where} has hooks on its gradient, which would never be called: fully_shard makes other parameters. "
            "fix: register them on the sharded ones, with register_post_accumulate_grad_hook, after fully_shard"
        )


def _kind_of(name: str, parameter: nn.Parameter, root: nn.Module) -> type[nn.Parameter] | None:
    """Return the subclass of ``nn.Parameter`` that a parameter has; None for a plain one, and for a DTensor.

    Raises:
        ConfigError: it is trained, and the class has functions of PyTorch call its own code.
    """
    kind = type(parameter)
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        return None
    is_plain = kind.__torch_function__ is nn.Parameter.__torch_function__
    if is_plain and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return kind
    if parameter.requires_grad:
        raise ConfigError(
            f"{type(root).__name__}: parameter {name!r} is a {kind.__name__}, whose __torch_function__ or "
            "__torch_dispatch__ would no longer be called: the unit shows parameters of its own classes. fix: make it "
            "an nn.Parameter, or a subclass without these; give the class fsdp_pre_all_gather and "
            "fsdp_post_all_gather; or list it in ignored_params."
        )
    return None


def mark_owned(parameter: nn.Parameter, unit: str, name: str) -> None:
    """Remember that ``parameter`` belongs to a unit, under a name."""
    _OWNERS[parameter] = (unit, name)


def mark_ignored(modules: Iterable[nn.Module], ignored: Iterable[nn.Parameter]) -> None:
    """Remember the parameters that the user lists in ``ignored_params``, and their places in the modules.

    The places are needed because ``to_empty`` makes new objects, and the objects because they may be registered in
    other places too.
    """
    ids = set()
    for parameter in ignored:
        ids.add(id(parameter))
        _IGNORED[parameter] = True
    for module in {below for root in modules for below in root.modules()} if ids else ():
        names = {name for name, parameter in module._parameters.items() if id(parameter) in ids}
        if names:
            _PLACES_OF_IGNORED.setdefault(module, set()).update(names)


def is_ignored(parameter: torch.Tensor) -> bool:
    """Return whether the user listed a parameter in ``ignored_params`` of any unit."""
    return parameter in _IGNORED or any(
        module._parameters.get(name) is parameter for module, names in _PLACES_OF_IGNORED.items() for name in names
    )


def _check_module(name: str, module: nn.Module, root: nn.Module) -> None:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise ConfigError(
            f"{type(root).__name__}: parameter {name!r} is of a {type(module).__name__} with max_norm="
            f"{module.max_norm}, whose forward changes the rows that this rank's data uses: ranks would have different "
            "weights. fix: build it without max_norm, and renormalise after optimizer.step(): under torch.no_grad(), "
            "weight.copy_(torch.renorm(weight, 2, 0, max_norm)); or list it in ignored_params"
        )


def owned_name(tensor: torch.Tensor) -> str | None:
    """Return the name in its unit of a sharded parameter, or of one that it has replaced; None for any other tensor."""
    return _OWNERS[tensor][1] if tensor in _OWNERS else None


def owner_words(tensor: torch.Tensor) -> str | None:
    """Return the description of a sharded parameter for messages; None for any other tensor."""
    if not isinstance(tensor, DTensor) or tensor not in _OWNERS:
        return None
    unit, name = _OWNERS[tensor]
    return f"parameter {name!r} of unit {unit!r}"
