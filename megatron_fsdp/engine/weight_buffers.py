"""WeightBuffers: the main, resting and gathered weights of one parameter group.

In order of time: ``gather`` allocates the gathered weights and returns the all-gather into them. ``release`` frees
them. After an optimizer's step ``start_refresh`` casts main weights to resting weights, if the strategy has both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import BufferPlacement, DBuffer, PlacementError, Plan, Replicate
from dbuffer.collectives.parts import Part
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis, neighbours
from dbuffer.route import Route
from dbuffer.storage import FlatStorage
from dbuffer_kernels import cast_copy
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.engine.split_main_params import Remainder
from megatron_fsdp.engine.unsharded_param import GatheredWeight
from megatron_fsdp.errors import ConfigError

__all__ = ["GatherFunction", "GatherHooks", "WeightBuffers"]


# A replacement for the all-gather: (output, input, group, async_op) -> handle or None, as FSDP2's ``AllGather``.
GatherFunction = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, bool], "dist.Work | None"]


class WeightBuffers:
    """Main weights, resting weights and gathered weights of one group.

    Per use of the unit: ``gather`` reads resting weights and writes gathered weights; ``release`` frees those. If main
    and resting weights are two buffers, the first forward after a step copies main to resting weights (``_refresh``).

    Args:
        hooks: gathers bytes instead of the main weights; None to gather the weights.

    Attributes:
        main: the main weights, which the optimizer updates.
        model: the resting weights, which gathers read. ``main`` itself if the strategy shards both alike; the gather
            casts it to the compute dtype. Otherwise a buffer of the compute dtype, with ``main`` as a slice of it if
            the dtypes are equal.
        remainder: the low bits of FP32 main weights, if ``main`` has only the high ones (split weights); else None.
        gathered: the gathered weights, which compute uses; ``model`` itself with ``rests_whole``.
        rests_whole: every rank has the whole resting weights, so nothing is gathered.
        post_forward: the part kept from forward to backward, or None. is_from_part: the next gather reads that part.
        gather_function: called instead of the all-gather; None for the all-gather.
        has_copy: ``model`` is not ``main``, so a changed ``main`` needs a refresh.
        keeps_gathered: ``release`` keeps the memory of gathered weights.
        refreshes_locally: a refresh casts this rank's shard, without communication.
        can_restore_gathered: a refresh and a gather write all of the gathered weights again.
    """

    main: DBuffer
    model: DBuffer
    post_forward: PostForwardShard | None = None
    is_from_part = False
    gather_function: GatherFunction | None = None
    keeps_gathered = False
    _route: Route | None = None

    def __init__(self, plan: Plan, spec: GroupSpec, name: str, *, hooks: GatherHooks | None = None) -> None:
        self._spec, self._plan, self.gather_hooks = spec, plan, hooks
        placements, dtypes = spec.placements, spec.dtypes
        resting, stepped = placements.parameter, placements.optimizer
        whole: tuple[BufferPlacement, ...] = (Replicate(),) * len(resting)
        self.rests_whole = resting == whole
        if spec.gathers_main_weights:
            self.main = self.model = self._buffer(stepped, dtypes.main, spec.resting_device)
        else:
            self.model = self._buffer(resting, dtypes.compute, spec.resting_device)
            if dtypes.main is dtypes.compute:
                # The optimizer's shard is a slice of the resting weights, not a second copy.
                self.main = self.model.slice_view(stepped)
            else:
                self.main = self._buffer(stepped, dtypes.main, spec.resting_device)
        # A group on the meta device has no weights to gather; its refresh raises the error.
        self.has_copy = self.main is not self.model or spec.is_meta
        self.refreshes_locally = self.main.placements == self.model.placements
        self.gathered = self.model
        if not self.rests_whole:
            # PyTorch makes views on allocated memory only; ``release`` follows when the views exist.
            self.gathered = self.make_gathered() if hooks is None else hooks.attach(self)
        # .data gives the views a separate version counter: autograd must not take another gather, which writes the
        # same values, for a change of the tensors that it saved.
        self._views = self.gathered.local_buffer.data
        self._gathered_shard = self.gathered.slice_view(resting)
        self.can_restore_gathered = self.gathered is not self.model or self.main.dtype is not self.model.dtype
        self.remainder = Remainder(self.main, pin_memory=spec.is_pinned) if dtypes.is_split else None
        self.rename(name)
        self.main.zero_()

    def make_gathered(self) -> DBuffer:
        """Return a new buffer for gathered weights of the compute dtype."""
        whole: tuple[BufferPlacement, ...] = (Replicate(),) * len(self._spec.placements.parameter)
        return self._buffer(whole, self._spec.dtypes.compute, self._spec.compute_device)

    def _buffer(self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, device: torch.device) -> DBuffer:
        spec = self._spec
        return DBuffer.from_plan(self._plan, spec.mesh, placements, dtype, device, pin_memory=spec.is_pinned)

    def sharded_rows(self, index: int, owned: OwnedParameter) -> DTensor:
        """Return the sharded parameter, a DTensor over ``main``."""
        rows = self.main.get_dtensor(index)
        return rows if owned.tensor_parallel is None else owned.tensor_parallel.as_sharded(rows)

    def unsharded_param(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Return the unsharded parameter, a view of ``gathered``."""
        like = self.gathered.get_local_tensor(index)
        view = self._views.as_strided(like.shape, like.stride(), like.storage_offset())
        if owned.tensor_parallel is not None:
            return nn.Parameter(owned.tensor_parallel.gathered(view), requires_grad=False)
        # ``nn.Parameter(view)`` would have a separate version counter, so the class of a view is changed instead.
        param: Any = view.detach()
        param.__class__ = GatheredWeight
        assert isinstance(param, GatheredWeight)
        return param

    # ------------------------------------------------------------------ gather and release

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Allocate the gathered weights, and return the gather into them for the caller to issue.

        A gather of more than one collective is issued here.
        """
        self.gathered.storage.reallocate()
        hooks = self.gather_hooks
        if self.is_from_part and self.post_forward is not None:
            if hooks is not None:
                # The part is one of the bytes, or of the weights that were made from them.
                hooks.has_arrived = hooks.arrived is self.gathered
            return [self.post_forward.gather()]
        if hooks is not None:
            return self._gather_bytes(hooks, works)
        source = self.model
        if self._spec.is_offloaded or source.dtype is not self.gathered.dtype:
            source = self._gathered_shard
            if source.dtype is self.model.dtype:
                source.local_buffer.copy_(self.model.local_buffer, non_blocking=True)
            else:
                main = self.model.local_buffer
                if self._spec.is_offloaded:
                    # Copy to the device before the cast, which is cheap there (FSDP2's ``all_gather_inputs``).
                    main = main.to(source.device, non_blocking=True)
                cast_copy(main, source.local_buffer)
        if self.gather_function is None:
            if self._route is None:
                self._route = Route(source, self.gathered)
            return self._route.ready or self._route.parts(works)
        group = only_flat_axis(source.axes, source.placements).gather_group
        work = self.gather_function(self.gathered.local_buffer, source.local_buffer, group, works is not None)
        if works is not None and work is not None:
            works.append(work)
        return []

    def _gather_bytes(self, hooks: GatherHooks, works: list[dist.Work] | None) -> list[Part]:
        if self.gather_function is not None:
            raise ConfigError(
                f"{self.main.name}: has all-gather hooks and a custom all-gather function. fix: give one of the two"
            )
        parts = hooks.pre_all_gather(works)
        hooks.has_arrived = True
        return parts

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered weights.

        Args:
            keep_generation: the weights' generation, to keep a part of them after forward; None to keep no part.
        """
        if self.rests_whole:
            return
        if keep_generation is not None and self.post_forward is not None:
            self.post_forward.keep(keep_generation)
        if not self.keeps_gathered:
            self.gathered.storage.release()
        if self.gather_hooks is not None:
            self.gather_hooks.release(keeps_gathered=self.keeps_gathered)

    # ------------------------------------------------------------------ main weights have changed

    def start_refresh(self) -> list[Part]:
        """Cast this rank's main weights into the resting weights.

        Returns:
            The gather for the caller to issue, if resting weights are sharded less than main weights. A gather of more
            than one collective is issued here.
        """
        main, model = self.main, self.model
        if self.gather_hooks is not None:
            self.gather_hooks.refresh()
        if main is model:
            return []
        if self.remainder is not None:
            self.remainder.current()
        if self._spec.is_offloaded:
            # The collective and the cast run on the compute device.
            staged = self._buffer(main.placements, model.dtype, self._spec.compute_device)
            cast_copy(main.local_buffer.to(staged.device, non_blocking=True), staged.local_buffer)
            model.local_buffer.copy_(staged.redistribute(model.placements).local_buffer, non_blocking=True)
            return []
        shard = model if self.refreshes_locally else model.slice_view(main.placements)
        if shard.local_buffer.data_ptr() != main.local_buffer.data_ptr():
            cast_copy(main.local_buffer, shard.local_buffer)
        return [] if shard is model else Route(shard, model).parts(None)

    def end_refresh(self) -> bool:
        """Return True if the refresh wrote the memory of main weights (with the same values)."""
        if self.remainder is not None and self.main is not self.model:
            # The remainder still belongs to these main weights.
            self.remainder.accept()
        return not self.refreshes_locally

    # ------------------------------------------------------------------ between steps

    def values(self) -> DBuffer:
        """Return main weights in the optimizer's dtype: ``main``, or an FP32 copy of split weights.

        Changes of a copy take effect with ``store``.
        """
        return self.main if self.remainder is None else self.remainder.join()

    def store(self, values: DBuffer) -> None:
        """Write back the buffer that ``values`` returned, after the caller has changed it."""
        if self.remainder is not None:
            self.remainder.split(values)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write main weights from whole tensors in plan order, of any dtype and device."""
        values = self.values()
        for index, tensor in enumerate(tensors):
            values.write_tensor(index, tensor)
        self.store(values)

    def keep_part_for(self, size: int) -> None:
        """Keep a part of the weights from forward to backward, so that ``size`` neighbours hold them together.

        Args:
            size: number of these neighbours; 0 keeps no part.
        Raises:
            ConfigError: see ``check_part``.
        """
        axis = self.check_part(size)
        self.post_forward = None
        if axis is not None and size < axis.size:
            self.post_forward = PostForwardShard(self.gathered, axis, size)

    def check_part(self, size: int) -> MeshAxis | None:
        """Return the axis that ``keep_part_for`` would cut into groups of ``size``; None if it keeps no part.

        Raises:
            ConfigError: weights are not sharded over exactly one axis, or ``size`` does not divide it.
        """
        if not size or self.rests_whole:
            return None
        try:
            axis = only_flat_axis(self.model.axes, self.model.placements)
        except PlacementError as error:
            raise ConfigError(
                f"reshard_after_forward={size} needs weights that are sharded over exactly one axis: {error}. fix: use "
                "True or False"
            ) from error
        if size < 1 or axis.size % size:
            raise ConfigError(
                f"reshard_after_forward={size} does not divide the {axis.size} ranks of axis {axis.name!r} over which "
                "weights are sharded. fix: give a divisor, True or False"
            )
        return axis

    def agreed(self) -> Iterator[str]:
        """Yield descriptions that must be equal on all ranks, in addition to plan and dtypes."""
        if self.gather_hooks is not None:
            yield from self.gather_hooks.agreed()

    def rename(self, name: str) -> None:
        """Change the unit's name in messages and reports."""
        named = {"main_weight": self.main, "model_weight": self.model}
        if self.remainder is not None:
            named["remainder"] = self.remainder.buffer
        if not self.rests_whole:
            named["gathered weights"] = self.gathered
        for kind, buffer in named.items():
            buffer.rename(f"unit {name!r}: {kind}")


class PostForwardShard:
    """This rank's part of a group's gathered weights, kept from forward to backward.

    With ``reshard_after_forward=8`` on 64 ranks, eight neighbours hold the whole weights together, so backward gathers
    within them (one machine) instead of over all ranks, for eight times the shard's memory in between.

    Args:
        gathered: the buffer of gathered weights.
        axis: the axis that the weights are sharded over. size: number of ranks that hold the whole weights together.
    Attributes:
        axis: the axis of these ranks. storage: the memory of the part.
    """

    def __init__(self, gathered: DBuffer, axis: MeshAxis, size: int) -> None:
        self._gathered = gathered
        self.axis = neighbours(axis, size)
        numel = gathered.layout.numel // size
        self.storage = FlatStorage(numel, gathered.dtype, gathered.device, name=f"{gathered.name}: post-forward shard")
        self.storage.release()
        self._generation = -1

    def _mine(self) -> torch.Tensor:
        numel = self.storage.tensor.numel()
        return self._gathered.local_buffer.narrow(0, self.axis.rank * numel, numel)

    def keep(self, generation: int) -> None:
        """Copy this rank's part of the gathered weights, whose generation the caller gives."""
        self.storage.reallocate()
        self.storage.tensor.copy_(self._mine())
        self._generation = generation

    def holds(self, generation: int) -> bool:
        """Return True if the part is allocated and has weights of ``generation``."""
        return self.storage.is_allocated and self._generation == generation

    def gather(self) -> Part:
        """Return the gather of the whole weights from the smaller group."""
        mine = self._mine()
        mine.copy_(self.storage.tensor)
        return Part("all_gather", self.axis, self._gathered.local_buffer, mine)

    def drop(self) -> None:
        """Release the memory."""
        self.storage.release()


class GatherHooks(Protocol):
    """Gathers bytes instead of the main weights of a group, and makes weights from them (``variants/``).

    Attributes:
        sent: the bytes of this rank. arrived: the bytes of all ranks, allocated during a gather; may be the buffer of
            gathered weights itself.
        has_arrived: the last gather brought bytes, and ``post_all_gather`` has not made weights from them yet.
    """

    sent: DBuffer
    arrived: DBuffer
    has_arrived: bool

    def attach(self, weights: WeightBuffers) -> DBuffer:
        """Make ``sent`` and ``arrived`` for these main weights; return the buffer of gathered weights."""

    def refresh(self) -> None:
        """Update ``sent`` after a change of main weights."""

    def pre_all_gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Fill ``sent``, and return its gather into ``arrived``, as ``WeightBuffers.gather`` does."""

    def post_all_gather(self) -> None:
        """Make weights from ``arrived``, on the gather lane."""

    def release(self, *, keeps_gathered: bool) -> None:
        """Release memory other than the gathered weights, which the caller releases unless ``keeps_gathered``."""

    def agreed(self) -> Iterator[str]:
        """Yield descriptions that must be equal on all ranks."""
