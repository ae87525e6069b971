"""ExtensionWeights and ExtensionParams: parameters whose class says what is gathered, by FSDP2's two hooks.

Every such parameter is a group of its own, of the bytes that ``fsdp_pre_all_gather`` returns, whatever their
sizes and dtypes (docs/design/low_precision.md).
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_iter

from dbuffer import DBuffer, Element, Flat, FlatDTensor, Plan
from dbuffer.collectives import Part
from dbuffer.placements import Replicate as Whole
from dbuffer.route import Route
from dbuffer.storage import FlatStorage
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.extension import Extension
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.runtime.step.fsdp_params import FSDPParams
from megatron_fsdp.runtime.weights.gathered_weight import KINDS
from megatron_fsdp.runtime.weights.sharded_weights import ShardedWeights
from megatron_fsdp.runtime.weights.stale_weights import mark_gathered

__all__ = ["ExtensionWeights", "make_extension_params"]

_ALIGNMENT = 16
_DROP_HOOK = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class _Wire:
    """Buffers for tensors of given shapes and dtypes: one run of bytes for each rank, and the tensors of all ranks.

    Attributes:
        signature: shape and dtype of each tensor. ranges: where each lies in a run.
        sent: this rank's run. gathered: all runs. outputs: the tensors, each of all ranks. route: sent to gathered.
    """

    signature: _Signature
    ranges: tuple[tuple[int, int], ...]
    sent: DBuffer
    gathered: DBuffer
    outputs: tuple[FlatStorage, ...]
    route: Route


@dataclass(frozen=True, slots=True)
class _Made:
    """Memory that ``fsdp_post_all_gather`` made: the storage of one of the inner tensors that it returned."""

    storage: torch.UntypedStorage
    num_bytes: int

    def reallocate(self) -> None:
        """Bring the bytes back for the hook to fill."""
        if not self.storage.nbytes():
            self.storage.resize_(self.num_bytes)


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors in a structure that are no wrappers around others, by identity."""
    tensors = [each for each in tree_iter(tree) if isinstance(each, torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if not hasattr(each, "__tensor_flatten__")]
    return {each._cdata: each for each in storages}


def _make_wire(signature: _Signature, spec: GroupSpec, axis: int, where: str) -> _Wire:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in signature]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    num_ranks = spec.mesh.size(axis)
    plan = Plan(((num_ranks * starts[-1],),), (Element(),), num_ranks, (0,), starts[-1])
    whole = tuple(Whole() for _ in spec.placements.parameter)
    name = f"{where}: bytes of its all-gather"
    sent = DBuffer.from_plan(plan, spec.mesh, spec.placements.parameter, torch.uint8, spec.device, name=name)
    gathered = DBuffer.from_plan(plan, spec.mesh, whole, torch.uint8, spec.device, name=name)
    outputs = tuple(
        FlatStorage(num_ranks * math.prod(shape), dtype, spec.device, name=f"{where}: gathered tensor")
        for shape, dtype in signature
    )
    ranges = tuple((start, start + size) for start, size in zip(starts, sizes, strict=False))
    return _Wire(signature, ranges, sent, gathered, outputs, Route(sent, gathered))


class ExtensionWeights(ShardedWeights):
    """Weight buffers of one parameter of a subclass: its part at rest, the bytes on their way, what compute uses.

    Attributes:
        part: this rank's part as the subclass; its hook is asked at every gather.
        used: the whole parameter that ``fsdp_post_all_gather`` made; the same object in every gather.
    Raises:
        ConfigError: the weights rest whole or in CPU memory, or a hook returns something else than it should.
    """

    def __init__(self, owned: OwnedParameter, plan: Plan, spec: GroupSpec, name: str) -> None:
        assert owned.extension is not None
        self._extension: Extension = owned.extension
        self._where = f"unit {name!r}, parameter {owned.name!r} ({self._extension.kind.__name__})"
        resting = spec.placements.parameter
        if spec.is_offloaded or spec.placements.optimizer != resting or resting.count(Flat()) != 1:
            raise ConfigError(
                f"{self._where}: its all-gather hooks need weights that rest sharded over one axis, on their device; "
                "use Placements.optim_grads_params or hsdp without CPU offload, or list it in ignored_params"
            )
        self._spec, self._plan = spec, plan
        self._module = weakref.ref(owned.param_module_infos[0].module)
        self.main = self.model = self._buffer(resting, spec.dtypes.main, spec.resting_device).zero_()
        self._axis = resting.index(Flat())
        self._fill_part(owned)
        self._mesh: DeviceMesh = _axis_mesh(spec.mesh, self._axis)
        self.part = self._extension.part(self.main.get_local_tensor(0))
        self._metadata: Any = None
        self._wires: dict[Any, _Wire] = {}
        self._wire = self._wire_for(self._ask())
        self.gathered = self._wire.gathered
        self._gathered_shard = self._wire.sent
        self._made: tuple[_Made, ...] = ()
        self._drops_outputs = self._ask_to_drop()
        self.used = self._first_use()
        self.rename(name)

    def _fill_part(self, owned: OwnedParameter) -> None:
        """Give the hook the parameter's values already when it is asked for sizes."""
        self.main.write_tensor(0, owned.local_tensor)

    def _wire_for(self, tensors: Sequence[torch.Tensor]) -> _Wire:
        """Return the buffers for what the hook returned: a class may send something else in backward."""
        signature = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if signature not in self._wires:
            self._wires[signature] = _make_wire(signature, self._spec, self._axis, self._where)
        return self._wires[signature]

    @property
    def num_senders(self) -> int:
        """Ranks over which the parameter is sharded."""
        return self._spec.mesh.size(self._axis)

    def _ask(self) -> tuple[torch.Tensor, ...]:
        """Call ``fsdp_pre_all_gather`` in the form that its signature has."""
        hook = self.part.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arguments: list[Any] = [self._mesh]
        if len(inspect.signature(hook).parameters) > 1:
            own = self._extension
            arguments += [own.shape, own.stride, self._module(), _torch_policy(self._spec)]
        with torch.no_grad():
            found = hook(*arguments)
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(t, torch.Tensor) for t in found[0]):
            raise ConfigError(
                f"{self._where}: fsdp_pre_all_gather returned {type(found).__name__}; wanted a tuple of the tensors to "
                "gather and metadata"
            )
        tensors, self._metadata = tuple(found[0]), found[1]
        for tensor in tensors:
            if tensor.device.type != self._spec.device.type:
                raise ConfigError(f"{self._where}: fsdp_pre_all_gather returned a tensor on {tensor.device}")
        return tensors

    @property
    def sent(self) -> tuple[DBuffer, ...]:
        """This rank's part of what travels, which rests beside main weights."""
        return (self._wire.sent,)

    def agreed(self) -> Iterator[str]:
        """Yield what the hook sends: another size on another rank is refused before the first gather."""
        yield f"fsdp_pre_all_gather of {self._where} returns {self._wire.signature}"

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Ask the hook, and return the gather of what it returns."""
        if self.is_from_part and self.post_forward is not None:
            self.gathered.reallocate_storage()
            return [self.post_forward.gather()]
        if self.gather_function is not None:
            raise ConfigError(f"{self._where}: a custom all-gather function is not called for parameters with hooks")
        tensors = self._ask()
        wire = self._wire = self._wire_for(tensors)
        if wire.gathered is not self.gathered and self.post_forward is not None:
            raise StateError(
                f"{self._where}: fsdp_pre_all_gather returns other sizes than the first time, {wire.signature}, of "
                "which reshard_after_forward=<number> kept a part; use True or False"
            )
        wire.gathered.reallocate_storage()
        local = wire.sent.local_buffer
        for tensor, (start, stop) in zip(tensors, wire.ranges, strict=True):
            local[start:stop].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        return wire.route.parts(works)

    def gathered_is_used(self) -> None:
        """Sort what was gathered by tensors, and let ``fsdp_post_all_gather`` put the parameter together."""
        super().gathered_is_used()
        for storage in self._wire.outputs:
            storage.reallocate()
        for made in self._made:
            made.reallocate()
        self._finish(out=self.used)
        # What the ranks sent is copied; only the sorted tensors are used, or what the hook made of them. Of the
        # bytes as they came a part may be kept after forward.
        if self.post_forward is None:
            self._wire.gathered.release_storage()
        if self._drops_outputs:
            for storage in self._wire.outputs:
                storage.release()

    def _finish(self, *, out: torch.Tensor | None) -> Any:
        wire, num_ranks = self._wire, self._spec.mesh.size(self._axis)
        rows = wire.gathered.local_buffer.view(num_ranks, -1)
        outputs = []
        for storage, (start, stop), (shape, _) in zip(wire.outputs, wire.ranges, wire.signature, strict=True):
            storage.tensor.view(torch.uint8).view(num_ranks, -1).copy_(rows[:, start:stop])
            whole = (num_ranks * shape[0], *shape[1:]) if shape else (num_ranks,)
            outputs.append(storage.tensor.view(whole))
        param_dtype = self._param_dtype()
        hook = self.part.fsdp_post_all_gather  # type: ignore[attr-defined]
        with torch.no_grad():
            return hook(tuple(outputs), self._metadata, param_dtype, out=out)

    def _param_dtype(self) -> torch.dtype:
        return self._extension.dtype if self._extension.is_packed else self._spec.dtypes.compute

    def _first_use(self) -> nn.Parameter:
        self.gathered.local_buffer.zero_()
        found = self._finish(out=None)
        whole = found[0] if isinstance(found, tuple) and found else None
        if not isinstance(whole, torch.Tensor) or whole.shape != self._extension.shape:
            raise ConfigError(
                f"{self._where}: fsdp_post_all_gather made {getattr(whole, 'shape', found)!r}; wanted the whole tensor "
                f"of shape {tuple(self._extension.shape)} and its inner tensors"
            )
        self._made = tuple(self._made_by_hook(whole, found[1:]))
        return nn.Parameter(whole, requires_grad=False)

    def _ask_to_drop(self) -> bool:
        """Return whether the gathered tensors may go once the hook has made the parameter of them (PyTorch 2.15)."""
        asked = getattr(self.part, _DROP_HOOK, lambda: False)()
        if not isinstance(asked, bool):
            raise ConfigError(f"{self._where}: {_DROP_HOOK} returned {asked!r}; wanted True or False")
        return asked

    def _made_by_hook(self, whole: torch.Tensor, others: Sequence[Any]) -> Iterator[_Made]:
        """Yield the memory that the hook named as its own, which goes and comes with the gathered tensors.

        Raises:
            ConfigError: it lies in the gathered tensors, which the class wants to be rid of.
        """
        outputs = _storages([storage.tensor for storage in self._wire.outputs])
        if self._drops_outputs and not outputs.keys().isdisjoint(_storages([whole, others])):
            raise ConfigError(
                f"{self._where}: {_DROP_HOOK} is True, but what fsdp_post_all_gather made lies in the tensors that it "
                "was given; return False, or make it of memory of its own"
            )
        yield from (_Made(each, each.nbytes()) for key, each in _storages(others).items() if key not in outputs)

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered tensors; see ``WeightBuffers``."""
        super().release(keep_generation=keep_generation)
        for wire in self._wires.values():
            for storage in wire.outputs if not self.keeps_gathered else ():
                storage.release()
            wire.gathered.release_storage()
        for made in self._made if not self.keeps_gathered else ():
            made.storage.resize_(0)

    def start_refresh(self) -> list[Part]:
        """Main weights are what the hook is asked about: nothing to bring up to date."""
        return []


def _axis_mesh(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[axis]]


def _torch_policy(spec: GroupSpec) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=spec.dtypes.compute, reduce_dtype=spec.dtypes.reduce)


def make_extension_params(owned: Sequence[OwnedParameter], weights: ExtensionWeights) -> FSDPParams:
    """Return the one parameter: sharded a DTensor whose local tensor is the subclass, unsharded what the hook made."""
    extension = owned[0].extension
    assert extension is not None
    resting = partial(_resting, weights, extension)
    sharded = nn.Parameter(resting(0), requires_grad=owned[0].parameter.requires_grad)
    # A parameter is a detached copy of the wrappers, over the same memory: users reach the part by it.
    weights.part = sharded._local_tensor  # type: ignore[attr-defined]
    mark_gathered(weights.used, owned[0].name)
    params = FSDPParams(owned, weights.main, [sharded], [weights.used], resting, KINDS)
    params.subclass = extension.kind.__name__
    return params


def _resting(weights: ExtensionWeights, extension: Extension, _: int) -> DTensor:
    main, part = weights.main, weights.part
    if not extension.is_packed:
        rows = main.get_dtensor(0)
        assert isinstance(rows, FlatDTensor)
        return FlatDTensor(part, rows._spec, requires_grad=False)
    placements = [Shard(0) if each == Flat() else Replicate() for each in main.placements]
    return DTensor.from_local(
        part, main.mesh, placements, run_check=False, shape=extension.shape, stride=extension.stride
    )
