"""The weight buffers of one parameter group: what the optimizer steps, what rests, what compute uses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from dbuffer import DBuffer, Plan, Replicate
from dbuffer.collectives import Part
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis
from dbuffer.placements import BufferPlacement
from dbuffer.route import Route
from dbuffer_kernels import cast_copy
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.runtime.weights.post_forward_shard import PostForwardShard, check_post_forward_size
from megatron_fsdp.runtime.weights.split_weights import Remainder

__all__ = [
    "GatherFunction",
    "WeightBuffers",
]

# A replacement for the all-gather: (output, input, group, async_op) -> handle or None, as FSDP2's ``AllGather``.
GatherFunction = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup, bool], "dist.Work | None"]


class WeightBuffers:
    """Main weights, weights at rest, and gathered weights, and how one becomes the other.

    Attributes:
        main: what the optimizer updates.
        model: what gathers start from: ``main`` itself where placements agree, which a gather casts on its way; else
            compute weights at rest, which share the memory of ``main`` where the dtype is one.
        remainder: what ``main`` lacks of FP32 weights; None unless these are split.
        gathered: what compute uses; ``model`` itself where that rests whole on every rank.
        rests_whole: whether it does.
        post_forward: the part kept from forward to backward, if any.
        gather_function: used instead of the all-gather.
        has_copy: whether gathers start from anything but ``main`` itself, which a refresh brings up to date.
        keeps_gathered: ``release`` leaves the memory of gathered weights where it is.
        lands: they are ``HookedWeights``, and have to ``land``.
    """

    has_copy = True
    lands = False

    def __init__(self, plan: Plan, spec: GroupSpec, name: str) -> None:
        self._spec = spec
        self._plan = plan
        placements, dtypes = spec.placements, spec.dtypes
        resting, stepped = placements.parameter, placements.optimizer
        whole: tuple[BufferPlacement, ...] = tuple(Replicate() for _ in resting)
        self.rests_whole = resting == whole
        self.post_forward: PostForwardShard | None = None
        self.gather_function: GatherFunction | None = None
        self.keeps_gathered = False
        if spec.gathers_main_weights:
            self.main = self.model = self._buffer(stepped, dtypes.main, spec.resting_device)
        elif dtypes.main is not dtypes.compute:
            self.model = self._buffer(resting, dtypes.compute, spec.resting_device)
            self.main = self._buffer(stepped, dtypes.main, spec.resting_device)
        else:
            self.model = self._buffer(resting, dtypes.compute, spec.resting_device)
            # Same dtype, finer placement: the optimizer's shard is a slice of the compute weights, not a second copy.
            self.main = self.model.slice_view(stepped)
        self.has_copy = self.main is not self.model
        self.gathered = self.model
        if not self.rests_whole:
            # PyTorch makes views only on memory that is there; ``release`` follows when the views exist.
            self.gathered = self._buffer(whole, dtypes.compute, spec.compute_device)
        self._gathered_shard = self.gathered.slice_view(resting)
        self._is_from_part = False
        self._route: Route | None = None
        self.remainder = Remainder(self.main, pin_memory=spec.is_pinned) if dtypes.is_split else None
        self.rename(name)
        self.main.zero_()

    def _buffer(self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, device: torch.device) -> DBuffer:
        spec = self._spec
        return DBuffer.from_plan(self._plan, spec.mesh, placements, dtype, device, pin_memory=spec.is_pinned)

    def agreed(self) -> Iterator[str]:
        """Yield what ranks must have in common beside plan and dtypes."""
        yield from ()

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        self.main.rename(f"unit {name!r}: main_weight")
        self.model.rename(f"unit {name!r}: model_weight")
        if self.remainder is not None:
            self.remainder.buffer.rename(f"unit {name!r}: remainder")
        if not self.rests_whole:
            self.gathered.rename(f"unit {name!r}: gathered weights")

    def values(self) -> DBuffer:
        """Return main weights in the dtype in which they are stepped: ``main``, or an FP32 copy where they are split.

        Changes of a copy count when ``store`` has taken it.
        """
        return self.main if self.remainder is None else self.remainder.join()

    def store(self, values: DBuffer) -> None:
        """Take over what ``values`` returned, with what was written to it since."""
        if self.remainder is not None:
            self.remainder.split(values)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write main weights from whole tensors in plan order, of any dtype and device."""
        values = self.values()
        for index, tensor in enumerate(tensors):
            values.write_tensor(index, tensor)
        self.store(values)

    @functools.cached_property
    def refreshes_locally(self) -> bool:
        """Whether weights at rest follow main weights by a cast of this rank's shard, without communication."""
        return self.main.placements == self.model.placements

    @property
    def can_restore_gathered(self) -> bool:
        """Whether a refresh and a gather write all of the gathered weights again."""
        return self.gathered is not self.model or self.main.dtype is not self.model.dtype

    def keep_part_for(self, size: int) -> None:
        """Keep, from forward to backward, a part of the weights such that ``size`` neighbours hold them together.

        Args:
            size: of the smaller group; 0 goes back to one shard per rank.
        Raises:
            ConfigError: ``size`` does not divide the axis over which weights are sharded.
        """
        axis = self.check_part(size)
        self.post_forward = None
        if axis is not None and size < axis.size:
            self.post_forward = PostForwardShard(self.gathered, axis, size)

    def check_part(self, size: int) -> MeshAxis | None:
        """Return the axis that ``keep_part_for`` would cut into groups of ``size``; None for none. Raises as that."""
        if not size or self.rests_whole:
            return None
        return check_post_forward_size(size, self.model.axes, self.model.placements)

    def choose_source(self, generation: int) -> None:
        """Let the next ``gather`` take the part kept after forward if that is of this generation."""
        self._is_from_part = self.post_forward is not None and self.post_forward.holds(generation)

    def gather(self, works: list[dist.Work] | None) -> list[Part]:
        """Allocate the gathered weights and return the gather into them; one that is no single collective is issued."""
        self.gathered.storage.reallocate()
        if self._is_from_part and self.post_forward is not None:
            return [self.post_forward.gather()]
        source = self.model
        if self._spec.is_offloaded:
            source = self._gathered_shard
            source.local_buffer.copy_(self.model.local_buffer, non_blocking=True)
        elif source.dtype is not self.gathered.dtype:
            source = self._gathered_shard
            cast_copy(self.model.local_buffer, source.local_buffer)
        if self.gather_function is None:
            if self._route is None:
                self._route = Route(source, self.gathered)
            return self._route.ready or self._route.parts(works)
        group = only_flat_axis(source.axes, source.placements).gather_group
        work = self.gather_function(self.gathered.local_buffer, source.local_buffer, group, works is not None)
        if works is not None and work is not None:
            works.append(work)
        return []

    def release(self, *, keep_generation: int | None = None) -> None:
        """Release the gathered weights; where a part is kept after forward, note the generation it is of."""
        if self.rests_whole:
            return
        if keep_generation is not None and self.post_forward is not None:
            self.post_forward.keep(keep_generation)
        if not self.keeps_gathered:
            self.gathered.storage.release()

    def start_refresh(self) -> list[Part]:
        """Begin to bring weights at rest up to date with main weights: cast them.

        Returns:
            The gather that is left to do where weights rest coarser; one that is no single collective is done.
        """
        main, model = self.main, self.model
        if main is model:
            return []
        if self.remainder is not None:
            self.remainder.current()
        shard = model if self.refreshes_locally else model.slice_view(main.placements)
        if shard.local_buffer.data_ptr() != main.local_buffer.data_ptr():
            cast_copy(main.local_buffer, shard.local_buffer)
        if shard is model:
            return []
        if not self._spec.is_offloaded:
            return Route(shard, model).parts(None)
        # Collectives run where compute does.
        staged = self._buffer(shard.placements, shard.dtype, self._spec.compute_device)
        staged.local_buffer.copy_(shard.local_buffer)
        model.local_buffer.copy_(staged.redistribute(model.placements).local_buffer)
        return []

    def end_refresh(self) -> bool:
        """Return whether the refresh wrote main weights' own memory (with the values it had)."""
        if self.remainder is not None and self.main is not self.model:
            # The remainder stays theirs.
            self.remainder.accept()
        return not self.refreshes_locally
