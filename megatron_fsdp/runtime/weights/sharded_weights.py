"""ShardedWeights: how weight buffers are made, and what they do between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dbuffer import BufferPlacement, DBuffer, PlacementError, Plan, Replicate
from dbuffer.collectives import Part
from dbuffer.collectives_together import gather_together
from dbuffer.events import listeners, tell
from dbuffer.layout import only_flat_axis
from dbuffer.mesh import MeshAxis, neighbours
from dbuffer.route import Route
from dbuffer.storage import FlatStorage
from dbuffer_kernels import cast_copy
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.build.ownership import OwnedParameter
from megatron_fsdp.errors import ConfigError, StateError
from megatron_fsdp.runtime.step.parameter_group import ParameterGroup, WeightBuffers
from megatron_fsdp.runtime.weights.gathered_weight import GatheredWeight
from megatron_fsdp.runtime.weights.split_weights import Remainder

__all__ = ["ShardedWeights", "announce_step"]


class PostForwardShard:
    """This rank's part of a group's gathered weights while forward is over and backward has not begun.

    With ``reshard_after_forward=8`` on 64 ranks, eight neighbours hold the whole weights together, so backward gathers
    within them (one machine) instead of over all ranks, for eight times the shard's memory in between.

    Args:
        axis: over which the weights are sharded. size: of the smaller groups.
    Attributes:
        axis: the smaller group. storage: what the part lies in.
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
        """Copy this rank's part of the gathered weights, which are of a certain generation."""
        self.storage.reallocate()
        self.storage.tensor.copy_(self._mine())
        self._generation = generation

    def holds(self, generation: int) -> bool:
        """Whether it holds weights of that generation."""
        return self.storage.is_allocated and self._generation == generation

    def gather(self) -> Part:
        """Return the gather of the whole weights from the smaller group."""
        mine = self._mine()
        mine.copy_(self.storage.tensor)
        return Part(self.axis, self._gathered.local_buffer, mine)

    def drop(self) -> None:
        """Release the memory."""
        self.storage.release()


class ShardedWeights(WeightBuffers):
    """Weights that a cast, or nothing, turns into compute weights; the base of the other kinds.

    Attributes:
        main: what the optimizer updates.
        model: what gathers start from: ``main`` itself where placements agree, which a gather casts on its way; else
            compute weights at rest, which share the memory of ``main`` where the dtype is one.
        remainder: what ``main`` lacks of FP32 weights; None unless these are split.
        gathered: what compute uses; ``model`` itself where that rests whole on every rank.
        rests_whole: whether it does.
        post_forward: the part kept from forward to backward, if any. is_from_part: whether the next gather takes it.
        gather_function: used instead of the all-gather.
        has_copy: whether gathers start from anything but ``main`` itself, which a refresh brings up to date.
        keeps_gathered: ``release`` leaves the memory of gathered weights where it is.
        refreshes_locally: whether a refresh is a cast of this rank's shard, without communication.
        can_restore_gathered: whether a refresh and a gather write all of the gathered weights again.
    """

    def __init__(self, plan: Plan, spec: GroupSpec, name: str) -> None:
        self._spec, self._plan = spec, plan
        placements, dtypes = spec.placements, spec.dtypes
        resting, stepped = placements.parameter, placements.optimizer
        whole: tuple[BufferPlacement, ...] = (Replicate(),) * len(resting)
        self.rests_whole = resting == whole
        if spec.gathers_main_weights:
            self.main = self.model = self._buffer(stepped, dtypes.main, spec.resting_device)
        else:
            self.model = self._buffer(resting, dtypes.compute, spec.resting_device)
            if dtypes.main is dtypes.compute:
                # The optimizer's shard is a slice of the compute weights, not a second copy.
                self.main = self.model.slice_view(stepped)
            else:
                self.main = self._buffer(stepped, dtypes.main, spec.resting_device)
        # A group on the meta device has no weights to gather, which its refresh says.
        self.has_copy = self.main is not self.model or spec.is_meta
        self.refreshes_locally = self.main.placements == self.model.placements
        self.gathered = self.model
        if not self.rests_whole:
            # PyTorch makes views only on memory that is there; ``release`` follows when the views exist.
            self.gathered = self._buffer(whole, dtypes.compute, spec.compute_device)
        # .data gives the views a version counter of their own. Gathering again must not look to autograd like a change
        # of the tensors it saved: the values are the same.
        self._views = self.gathered.local_buffer.data
        self._gathered_shard = self.gathered.slice_view(resting)
        self.can_restore_gathered = self.gathered is not self.model or self.main.dtype is not self.model.dtype
        self.remainder = Remainder(self.main, pin_memory=spec.is_pinned) if dtypes.is_split else None
        self.rename(name)
        self.main.zero_()

    def _buffer(self, placements: tuple[BufferPlacement, ...], dtype: torch.dtype, device: torch.device) -> DBuffer:
        spec = self._spec
        return DBuffer.from_plan(self._plan, spec.mesh, placements, dtype, device, pin_memory=spec.is_pinned)

    def resting(self, index: int, owned: OwnedParameter) -> DTensor:
        """Return the sharded parameter, over ``main``."""
        rows = self.main.get_dtensor(index)
        return rows if owned.split is None else owned.split.resting(rows)

    def unsharded(self, index: int, owned: OwnedParameter) -> nn.Parameter:
        """Return the parameter that compute uses, over ``gathered``."""
        like = self.gathered.get_local_tensor(index)
        view = self._views.as_strided(like.shape, like.stride(), like.storage_offset())
        if owned.split is not None:
            return nn.Parameter(owned.split.gathered(view), requires_grad=False)
        # A parameter that is made has a version counter of its own.
        param: Any = view.detach()
        param.__class__ = GatheredWeight
        assert isinstance(param, GatheredWeight)
        return param

    def agreed(self) -> Iterator[str]:
        """Yield what ranks must have in common beside plan and dtypes."""
        yield from ()

    def rename(self, name: str) -> None:
        """Take another unit name, for messages."""
        named = {"main_weight": self.main, "model_weight": self.model}
        if self.remainder is not None:
            named["remainder"] = self.remainder.buffer
        if not self.rests_whole:
            named["gathered weights"] = self.gathered
        for what, buffer in named.items():
            buffer.rename(f"unit {name!r}: {what}")

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

    def keep_part_for(self, size: int) -> None:
        """Keep, from forward to backward, a part of the weights such that ``size`` neighbours hold them together.

        Args:
            size: of the smaller group; 0 goes back to one shard per rank.
        Raises:
            ConfigError: as ``check_part``.
        """
        axis = self.check_part(size)
        self.post_forward = None
        if axis is not None and size < axis.size:
            self.post_forward = PostForwardShard(self.gathered, axis, size)

    def check_part(self, size: int) -> MeshAxis | None:
        """Return the axis that ``keep_part_for`` would cut into groups of ``size``; None for none.

        Raises:
            ConfigError: weights are not sharded over exactly one axis, or ``size`` does not divide it.
        """
        if not size or self.rests_whole:
            return None
        try:
            axis = only_flat_axis(self.model.axes, self.model.placements)
        except PlacementError as error:
            raise ConfigError(
                f"reshard_after_forward={size} needs weights that are sharded over exactly one axis: {error}; use True "
                "or False"
            ) from error
        if size < 1 or axis.size % size:
            raise ConfigError(
                f"reshard_after_forward={size}: it must divide the {axis.size} ranks of axis {axis.name!r} over which "
                "weights are sharded"
            )
        return axis

    # ------------------------------------------------------------------ main weights that have changed

    def refresh(self, groups: Sequence[ParameterGroup]) -> None:
        """Bring weights at rest of groups of one unit up to date, this one's among them: casts, and one gather.

        On a CPU the host waits for it: who looks for changes of main weights sees nothing of a gather into their
        memory.

        Raises:
            StateError: their parameters are on the meta device still.
        """
        for group in groups:
            if group.is_meta:
                raise StateError(
                    f"unit {group.name!r}: parameters {', '.join(map(repr, group.parameters))} are on the meta device "
                    "still. Call materialize(model), or model.to_empty(device=...) and initialise it, or load a "
                    "checkpoint."
                )
        for group in groups if listeners else ():
            tell("refresh", group)
        parts = [part for group in groups for part in group.weights.start_refresh()]
        try:
            if parts:
                gather_together(parts)
        finally:
            # Where both share memory the gather writes the main weights' bytes too, with the values that they have.
            share_memory = [group for group in groups if group.weights.end_refresh()]
        for group in groups:
            group.freshness.refreshed()
        for group in share_memory:
            group.freshness.look_again()
        for group in groups if listeners else ():
            tell("refreshed", group)

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
        if self._spec.is_offloaded:
            # Collectives run where compute does, and so does the cast.
            staged = self._buffer(main.placements, model.dtype, self._spec.compute_device)
            cast_copy(main.local_buffer.to(staged.device, non_blocking=True), staged.local_buffer)
            model.local_buffer.copy_(staged.redistribute(model.placements).local_buffer, non_blocking=True)
            return []
        shard = model if self.refreshes_locally else model.slice_view(main.placements)
        if shard.local_buffer.data_ptr() != main.local_buffer.data_ptr():
            cast_copy(main.local_buffer, shard.local_buffer)
        return [] if shard is model else Route(shard, model).parts(None)

    def end_refresh(self) -> bool:
        """Return whether the refresh wrote main weights' own memory (with the values it had)."""
        if self.remainder is not None and self.main is not self.model:
            # The remainder stays theirs.
            self.remainder.accept()
        return not self.refreshes_locally


def announce_step(groups: Iterable[ParameterGroup]) -> None:
    """Take notice that main weights are changed, or about to be: what rests is made again before its next use.

    An optimizer says so before it steps: one that raises has changed some of them.
    """
    for group in groups:
        group.freshness.has_changed = True
