"""ExtensionWeights: parameters of tensor subclasses with FSDP2's two all-gather hooks.

Each such parameter is a group of its own, which gathers the bytes that ``fsdp_pre_all_gather`` returns, of any sizes
and dtypes (docs/design/low_precision.md).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_iter

from dbuffer import BufferPlacement, DBuffer, Flat, FlatDTensor, Plan
from dbuffer.storage import FlatStorage
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.extension import ByteLayout, Extension
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.variants.hooked_weights import HookedWeights

__all__ = ["ExtensionWeights"]

_DROP_HOOK = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors in a structure that are no wrappers around others, by identity."""
    tensors = [each for each in tree_iter(tree) if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if not hasattr(each, "__tensor_flatten__")]
    return {each._cdata: each for each in storages}


class ExtensionWeights(HookedWeights):
    """Weight buffers of one parameter of a tensor subclass: its shard, the bytes to gather, the gathered parameter.

    Attributes:
        part: this rank's shard as the subclass. Its hook is called in every all-gather.
        used: the gathered parameter from ``fsdp_post_all_gather``; the same object in every all-gather.
    Raises:
        ConfigError: as ``HookedWeights``, or a hook returned a value of the wrong type.
    """

    def __init__(self, owned: OwnedParameter, plan: Plan, spec: GroupSpec, name: str) -> None:
        assert owned.extension is not None
        # Without values: the buffers hold them.
        self._extension: Extension = owned.extension.emptied()
        self._owned = owned
        self._module = weakref.ref(owned.param_module_infos[0].module)
        self._metadata: Any = None
        # The byte layout of the hook's last result, and the gathered tensors of all ranks.
        self._sent_as: ByteLayout | None = None
        self._outputs: tuple[FlatStorage, ...] = ()
        who = f"unit {name!r}, parameter {owned.name!r} ({self._extension.kind.__name__})"
        super().__init__(plan, spec, name, who=who, cure="list it in ignored_params")
        self.remainder = None
        # Storages that the hook allocated, with their sizes; released and reallocated with the gathered tensors.
        self._made: list[tuple[torch.UntypedStorage, int]] = []
        # Whether to release the gathered tensors once the hook has made the parameter (PyTorch 2.15).
        self._drops_outputs = getattr(self.part, _DROP_HOOK, lambda: False)()
        if not isinstance(self._drops_outputs, bool):
            raise ConfigError(f"{who}: {_DROP_HOOK} returned {self._drops_outputs!r}; wanted True or False")
        self.used = self._first_use()

    def _buffer(self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, device: torch.device) -> DBuffer:
        if Flat() in placements:
            return super()._buffer(placements, dtype, device)
        # The hook's bytes are gathered. Calling it with the parameter's values tells their sizes.
        self.main.write_tensor(0, self._owned.local_tensor)
        self.part = self._extension.part(self.main.get_local_tensor(0))
        self.pre_all_gather()
        return self.arrived

    def agreed(self) -> Iterator[str]:
        """Yield the shapes and dtypes that the hook sends; ranks that differ raise before the first all-gather."""
        assert self._sent_as is not None
        yield f"fsdp_pre_all_gather of {self._who} returns {self._sent_as.shapes} of {self._sent_as.dtypes}"

    def pre_all_gather(self) -> None:
        """Call the hook with the arguments of its signature, and copy the returned tensors to the send buffer."""
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
                f"{self._who}: fsdp_pre_all_gather raised {error!r}. If it reads FSDP2's private state, as "
                "TransformerEngine's MXFP8 weights do, shard the plain weight (with gather_dtype= of the policy)"
            ) from error
        layout, known = ByteLayout.of(tensors), self._sent_as
        if known is None:
            self._make_wire(layout.num_bytes)
            self._outputs = tuple(
                FlatStorage(self.num_ranks * tensor.numel(), tensor.dtype, tensor.device, name=self._who)
                for tensor in tensors
            )
        elif (layout.spans, layout.dtypes) != (known.spans, known.dtypes):
            raise StateError(
                f"{self._who}: fsdp_pre_all_gather returned {layout.shapes} of {layout.dtypes}, and {known.shapes} of "
                f"{known.dtypes} before; its sizes and dtypes have to stay"
            )
        self._sent_as = layout
        layout.write(tensors, self.sent.local_buffer)

    def _checked(self, found: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(t, torch.Tensor) for t in found[0]):
            raise ConfigError(
                f"{self._who}: fsdp_pre_all_gather returned {type(found).__name__}; wanted a tuple of the tensors to "
                "gather and metadata"
            )
        elsewhere = [tensor.device for tensor in found[0] if tensor.device.type != self._spec.device.type]
        if elsewhere:
            raise ConfigError(f"{self._who}: fsdp_pre_all_gather returned a tensor on {elsewhere[0]}")
        return tuple(found[0]), found[1]

    def post_all_gather(self) -> None:
        """Split the gathered bytes into tensors and call ``fsdp_post_all_gather``, which makes the parameter."""
        for made, num_bytes in self._made:
            made.resize_(num_bytes)
        self._finish(out=self.used)
        if self._drops_outputs:
            for storage in self._outputs:
                storage.release()

    def _finish(self, *, out: torch.Tensor | None) -> Any:
        assert self._sent_as is not None
        outputs, rows = [], self.arrived.local_buffer.view(self.num_ranks, -1)
        for storage, shape, span in zip(self._outputs, self._sent_as.shapes, self._sent_as.spans, strict=True):
            storage.reallocate()
            storage.tensor.view(torch.uint8).view(len(rows), -1).copy_(rows[:, span])
            outputs.append(storage.tensor.view((len(rows) * shape[0], *shape[1:]) if shape else (len(rows),)))
        hook = self.part.fsdp_post_all_gather  # type: ignore[attr-defined]
        dtype = self._extension.dtype if self._extension.is_packed else self._spec.dtypes.compute
        with torch.no_grad():
            return hook(tuple(outputs), self._metadata, dtype, out=out)

    def _first_use(self) -> nn.Parameter:
        self.gathered.local_buffer.zero_()
        found = self._finish(out=None)
        whole = found[0] if isinstance(found, tuple) and found else None
        if not isinstance(whole, torch.Tensor) or whole.shape != self._extension.shape:
            raise ConfigError(
                f"{self._who}: fsdp_post_all_gather made {getattr(whole, 'shape', found)!r}; wanted the whole tensor "
                f"of shape {tuple(self._extension.shape)} and its inner tensors"
            )
        given, others = _storages([storage.tensor for storage in self._outputs]), _storages(found[1:])
        if self._drops_outputs and not given.keys().isdisjoint(_storages(whole) | others):
            raise ConfigError(
                f"{self._who}: {_DROP_HOOK} is True, but what fsdp_post_all_gather made lies in the tensors that it "
                "was given; return False, or make it of memory of its own"
            )
        self._made = [(each, each.nbytes()) for key, each in others.items() if key not in given]
        return nn.Parameter(whole, requires_grad=False)

    def resting(self, index: int, owned: OwnedParameter) -> DTensor:
        """Return a DTensor whose local tensor is the part."""
        main, whole = self.main, self._extension
        if not whole.is_packed:
            rows = main.get_dtensor(0)
            assert isinstance(rows, FlatDTensor)
            return FlatDTensor(self.part, rows._spec, requires_grad=False)
        placements = [Shard(0) if each == Flat() else Replicate() for each in main.placements]
        return DTensor.from_local(
            self.part, main.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride
        )

    def unsharded(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Return what the hook made."""
        return self.used

    def take_part(self, sharded: nn.Parameter) -> str:
        """Ask the part that users reach by the sharded parameter from now on; return the name of its class."""
        # A parameter is a detached copy of the wrappers, over the same memory.
        self.part = sharded._local_tensor  # type: ignore[attr-defined]
        return str(self._extension.kind.__name__)

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered tensors; see ``WeightBuffers``."""
        super().release(keep_generation=keep_generation)
        self.arrived.release_storage()
        if not self.keeps_gathered:
            for storage in self._outputs:
                storage.release()
            for made, _ in self._made:
                made.resize_(0)
