"""ExtensionHooks: parameters of tensor subclasses that define FSDP2's two all-gather hooks.

Each such parameter has its own parameter group. The group gathers the tensors that ``fsdp_pre_all_gather`` returns, of
any sizes and dtypes, as bytes (docs/design/low_precision.md).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_iter

from dbuffer import DBuffer, Flat, FlatDTensor, Plan
from dbuffer.collectives.parts import Part
from dbuffer.storage import FlatStorage
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.extension import ByteLayout, Extension
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.weight_buffers import WeightBuffers
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.variants.hooked_weights import ByteWire, check_resting

__all__ = ["ExtensionHooks", "extension_weights"]

_DROP_HOOK = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the plain tensors in a pytree, by identity; wrapper subclasses are left out."""
    tensors = [each for each in tree_iter(tree) if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if not hasattr(each, "__tensor_flatten__")]
    return {each._cdata: each for each in storages}


def extension_weights(owned: OwnedParameter, plan: Plan, spec: GroupSpec, name: str) -> WeightBuffers:
    """Return the weight buffers of one parameter of a tensor subclass; ``ExtensionHooks`` gathers them.

    Raises:
        ConfigError: the weights are not sharded as ``check_resting`` requires, or a hook's result has a wrong type,
            shape or device.
    """
    hooks = ExtensionHooks(owned, spec, name)
    weights = WeightBuffers(plan, spec, name, hooks=hooks)
    weights.remainder = None
    hooks.make_first_use()
    return weights


class ExtensionHooks:
    """All-gather hooks for one parameter of a tensor subclass. Implements ``GatherHooks``.

    Attributes:
        part: this rank's shard, an instance of the subclass. Each all-gather calls its hook.
        used: the gathered parameter from ``fsdp_post_all_gather``; the same object in every all-gather.
    Raises:
        ConfigError: the weights are not sharded as ``check_resting`` requires.
    """

    sent: DBuffer
    arrived: DBuffer
    has_arrived = False
    part: torch.Tensor
    used: nn.Parameter
    _wire: ByteWire
    _main: DBuffer

    def __init__(self, owned: OwnedParameter, spec: GroupSpec, name: str) -> None:
        assert owned.extension is not None
        self._spec = spec
        # Without the values: only the buffers store them.
        self._extension: Extension = owned.extension.emptied()
        self._owned = owned
        self._module = weakref.ref(owned.param_module_infos[0].module)
        self._metadata: Any = None
        # The byte layout of the hook's last result, and the gathered tensors of all ranks.
        self._sent_as: ByteLayout | None = None
        self._outputs: tuple[FlatStorage, ...] = ()
        self._who = f"unit {name!r}, parameter {owned.name!r} ({self._extension.kind.__name__})"
        # Inner tensors that the hook allocated, with their sizes in bytes; resized along with the gathered tensors.
        self._made: list[tuple[torch.UntypedStorage, int]] = []
        self._drops_outputs = False
        check_resting(spec, self._who, "list it in ignored_params")

    def attach(self, weights: WeightBuffers) -> DBuffer:
        """Allocate buffers of the sizes that the hook returns for the parameter's current values."""
        self._main = weights.main
        self._main.write_tensor(0, self._owned.local_tensor)
        self.part = self._extension.part(self._main.get_local_tensor(0))
        self._fill()
        return self.arrived

    def make_first_use(self) -> None:
        """Call the hooks once, to create the parameter that compute uses.

        Raises:
            ConfigError: a hook's result has a wrong type, shape or device.
        """
        # Since PyTorch 2.15 the hook decides whether to release the gathered tensors after it has made the parameter.
        self._drops_outputs = getattr(self.part, _DROP_HOOK, lambda: False)()
        if not isinstance(self._drops_outputs, bool):
            raise ConfigError(
                f"{self._who}: {_DROP_HOOK} returned {self._drops_outputs!r}. fix: return True or False from it"
            )
        self.used = self._first_use()

    def refresh(self) -> None:
        """Do nothing: each all-gather calls the hook with the current weights."""

    def agreed(self) -> Iterator[str]:
        """Yield the shapes and dtypes that the hook sends; ranks that differ raise before the first all-gather."""
        assert self._sent_as is not None
        yield f"fsdp_pre_all_gather of {self._who} returns {self._sent_as.shapes} of {self._sent_as.dtypes}"

    def pre_all_gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Call ``fsdp_pre_all_gather`` and return the parts of the all-gather of its tensors, as bytes."""
        self._fill()
        return self._wire.parts(works)

    def _fill(self) -> None:
        """Call ``fsdp_pre_all_gather`` with one or five arguments, and write its tensors to ``sent``."""
        hook, spec, own = self.part.fsdp_pre_all_gather, self._spec, self._extension  # type: ignore[attr-defined]
        # The hook gets the mesh of the sharded axis only.
        names, axis = spec.mesh.mesh_dim_names, spec.placements.parameter.index(Flat())
        arguments: list[Any] = [spec.mesh if spec.mesh.ndim == 1 or names is None else spec.mesh[names[axis]]]
        if len(inspect.signature(hook).parameters) > 1:
            policy = MixedPrecisionPolicy(spec.dtypes.compute, spec.dtypes.reduce)
            arguments += [own.shape, own.stride, self._module(), policy]
        try:
            with torch.no_grad():
                tensors, self._metadata = self._checked(hook(*arguments))
        except AttributeError as error:
            raise ConfigError(
                f"{self._who}: fsdp_pre_all_gather raised {error!r}. TransformerEngine's MXFP8 weights, for example, "
                "read FSDP2's private state, which does not exist here. fix: shard the plain weight, with "
                'mp_policy=MixedPrecisionPolicy(gather_dtype="int8_block") if fewer bytes shall be gathered'
            ) from error
        layout, known = ByteLayout.of(tensors), self._sent_as
        if known is None:
            self._wire = ByteWire(spec, layout.num_bytes, self._who)
            self.sent, self.arrived = self._wire.sent, self._wire.arrived
            self._outputs = tuple(
                FlatStorage(self._wire.num_ranks * tensor.numel(), tensor.dtype, tensor.device, name=self._who)
                for tensor in tensors
            )
        elif (layout.spans, layout.dtypes) != (known.spans, known.dtypes):
            raise StateError(
                f"{self._who}: fsdp_pre_all_gather returned {layout.shapes} of {layout.dtypes}, but {known.shapes} of "
                f"{known.dtypes} before. fix: return tensors of the same sizes and dtypes in each call of the hook"
            )
        self._sent_as = layout
        layout.write(tensors, self.sent.local_buffer)

    def _checked(self, found: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(t, torch.Tensor) for t in found[0]):
            raise ConfigError(
                f"{self._who}: fsdp_pre_all_gather returned {type(found).__name__}. fix: return a pair: a tuple of the "
                "tensors to gather, and metadata"
            )
        elsewhere = [tensor.device for tensor in found[0] if tensor.device.type != self._spec.device.type]
        if elsewhere:
            raise ConfigError(
                f"{self._who}: fsdp_pre_all_gather returned a tensor on {elsewhere[0]}. fix: return tensors on "
                f"{self._spec.device.type}, the device of the parameter"
            )
        return tuple(found[0]), found[1]

    def post_all_gather(self) -> None:
        """Split the gathered bytes into tensors and call ``fsdp_post_all_gather`` on them."""
        for made, num_bytes in self._made:
            made.resize_(num_bytes)
        self._finish(out=self.used)
        if self._drops_outputs:
            for storage in self._outputs:
                storage.release()

    def _finish(self, *, out: torch.Tensor | None) -> Any:
        assert self._sent_as is not None
        outputs, rows = [], self.arrived.local_buffer.view(self._wire.num_ranks, -1)
        for storage, shape, span in zip(self._outputs, self._sent_as.shapes, self._sent_as.spans, strict=True):
            storage.reallocate()
            storage.tensor.view(torch.uint8).view(len(rows), -1).copy_(rows[:, span])
            outputs.append(storage.tensor.view((len(rows) * shape[0], *shape[1:]) if shape else (len(rows),)))
        hook = self.part.fsdp_post_all_gather  # type: ignore[attr-defined]
        dtype = self._extension.dtype if self._extension.is_packed else self._spec.dtypes.compute
        with torch.no_grad():
            return hook(tuple(outputs), self._metadata, dtype, out=out)

    def _first_use(self) -> nn.Parameter:
        self.arrived.local_buffer.zero_()
        found = self._finish(out=None)
        whole = found[0] if isinstance(found, tuple) and found else None
        if not isinstance(whole, torch.Tensor) or whole.shape != self._extension.shape:
            raise ConfigError(
                f"{self._who}: fsdp_post_all_gather returned {getattr(whole, 'shape', found)!r}. fix: with out=None, "
                f"return the whole tensor of shape {tuple(self._extension.shape)} and a tuple of its inner tensors"
            )
        given, others = _storages([storage.tensor for storage in self._outputs]), _storages(found[1:])
        if self._drops_outputs and not given.keys().isdisjoint(_storages(whole) | others):
            raise ConfigError(
                f"{self._who}: {_DROP_HOOK} returned True, but the parameter from fsdp_post_all_gather shares memory "
                "with the gathered tensors. fix: return False, or copy them in fsdp_post_all_gather"
            )
        self._made = [(each, each.nbytes()) for key, each in others.items() if key not in given]
        return nn.Parameter(whole, requires_grad=False)

    def sharded_rows(self) -> DTensor:
        """Return the sharded parameter: a DTensor whose local tensor is the part."""
        main, whole = self._main, self._extension
        if not whole.is_packed:
            rows = main.get_dtensor(0)
            assert isinstance(rows, FlatDTensor)
            return FlatDTensor(self.part, rows._spec, requires_grad=False)
        placements = [Shard(0) if each == Flat() else Replicate() for each in main.placements]
        return DTensor.from_local(
            self.part, main.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride
        )

    def take_part(self, sharded: nn.Parameter) -> str:
        """Call the hooks of the sharded parameter's own local tensor from now on; return the name of its class."""
        # ``nn.Parameter`` makes a new wrapper object over the same memory, and users change that one.
        self.part = sharded._local_tensor  # type: ignore[attr-defined]
        return str(self._extension.kind.__name__)

    def release(self, *, keeps_gathered: bool) -> None:
        """Release the bytes; and, unless ``keeps_gathered``, the gathered tensors."""
        self.arrived.release_storage()
        if not keeps_gathered:
            for storage in self._outputs:
                storage.release()
            for made, _ in self._made:
                made.resize_(0)
