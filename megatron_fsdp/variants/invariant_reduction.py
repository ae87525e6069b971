"""Sum gradients in an order that does not depend on the number of ranks, so that the result has the same bits.

With W ranks, microbatch t of rank r has number ``t * W + r`` in its step. A microbatch is a backward in which the ranks
exchange slices of gradients: one for each forward. The owner of a shard adds the slices in the order of these numbers,
like carries in a binary counter: two partial sums of equal size are added as soon as both exist. The order depends only
on the number of microbatches (docs/design/invariance.md).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dbuffer import DBuffer, Flat, Partial
from dbuffer.collectives.all_to_all import all_to_all_tensors
from dbuffer.collectives.parts import Part
from dbuffer.events import listeners, tell
from dbuffer.mesh import MeshAxis, flattened_mesh, make_groups
from dbuffer.placements import BufferPlacement
from dbuffer.storage import FlatStorage
from megatron_fsdp.build.builder import GroupSpec
from megatron_fsdp.engine.accumulation import Accumulation, GradBinding
from megatron_fsdp.engine.grads import GradientBuffer
from megatron_fsdp.engine.param_group import group_of_parameter
from megatron_fsdp.engine.param_loops import grads_of
from megatron_fsdp.engine.params import FSDPParams
from megatron_fsdp.engine.reduce import Hook, ReduceFunction, Wire, gradient_buffer
from megatron_fsdp.engine.unit import Call, Root, Unit
from megatron_fsdp.errors import StateError

__all__ = ["InvariantReduction", "invariant_gradients"]

# On CPU the kernel of ``fused=True`` uses other instructions for the last elements of a tensor. Which elements are last
# in a shard depends on the number of ranks.
_HOOKS: list[RemovableHandle] = []
_FLAG = 'MixedPrecisionPolicy(reduction="invariant")'


def _refuse_fused(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for options in optimizer.param_groups if optimizer.defaults.get("fused") else ():
        for parameter in options["params"]:
            group = group_of_parameter(parameter)
            gradients = None if group is None else group.gradient_buffer
            if gradients is not None and isinstance(gradients.reduction, InvariantReduction) and parameter.is_cpu:
                raise StateError(
                    f"unit {gradients.unit_name!r}: {type(optimizer).__name__}(fused=True) on CPU rounds the last "
                    f"elements of each shard differently from the rest, and {_FLAG} promises the same bits for any "
                    f"number of ranks. fix: {type(optimizer).__name__}(..., foreach=True)"
                )


class BinaryCounter:
    """Sum tensors in the order of a binary counter: partial sums of equal size are added.

    The memory (one tensor per bit of ``count``) is kept for the next sum.

    Attributes:
        count: the number of tensors added.
    """

    def __init__(self, dtype: torch.dtype, name: str = "") -> None:
        self.count = 0
        self._dtype, self._name = dtype, name
        # Maps a power of two to the partial sum of that many tensors.
        self._levels: dict[int, torch.Tensor] = {}
        self._memory: dict[int, FlatStorage] = {}
        self._free: list[torch.Tensor] = []

    def clear(self) -> None:
        """Drop all partial sums; keep their memory for the next sum."""
        self._free += self._levels.values()
        self._levels, self.count = {}, 0

    def push(self, *leaves: torch.Tensor) -> None:
        """Add 1-D tensors to the sum. A tensor that is not merged with another one is copied."""
        for leaf in leaves:
            carried, level = leaf, 0
            while self.count >> level & 1:
                carried = self._merged(self._levels.pop(level), carried)
                level += 1
            self._levels[level] = carried
            self.count += 1
        for level, held in self._levels.items():
            if id(held) not in self._memory:
                self._levels[level] = self._take(held).copy_(held)

    def _merged(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Add two partial sums in the memory of one of them. Tensors passed to ``push`` are not modified."""
        if id(first) not in self._memory:
            first, second = second, first
        if id(first) in self._memory:
            if id(second) in self._memory:
                self._free.append(second)
            return first.add_(second)
        memory = self._take(first)
        if first.dtype is self._dtype:
            return torch.add(first, second, out=memory)
        return memory.copy_(first).add_(second)

    def _take(self, like: torch.Tensor) -> torch.Tensor:
        if not self._free:
            storage = FlatStorage(like.numel(), self._dtype, like.device, name=f"{self._name}: sums")
            self._memory[id(storage.tensor)] = storage
            return storage.tensor
        return self._free.pop()

    def write(self, out: torch.Tensor, scale: float) -> None:
        """Add the partial sums from the smallest to the largest and write the result times ``scale``."""
        held = [level for _, level in sorted(self._levels.items())]
        is_direct = out.dtype is self._dtype and out.device == held[0].device
        total = out if is_direct else self._take(held[0])
        total.copy_(held[0])
        for level in held[1:]:
            total.add_(level)
        total.mul_(scale)
        if not is_direct:
            self._free.append(total)
            out.copy_(total)


class _Step:
    """The current step of one root: its microbatches until the optimizer steps.

    Attributes:
        number: how many microbatches there were in all steps. A backward that exchanges nothing, for the gradient of
            an input alone, is none.
        backward: the engine's number of the last backward that was a microbatch.
        first: the number of the step's first microbatch.
        last: for each parameter group, the number of the last microbatch that reduced its gradients.
        calls: the calls of units that the step's microbatches have entered, with the number of the microbatch.
    """

    def __init__(self) -> None:
        self.number = self.backward = self.first = 0
        self.last: weakref.WeakKeyDictionary[FSDPParams, int] = weakref.WeakKeyDictionary()
        self.calls: weakref.WeakKeyDictionary[Call, int] = weakref.WeakKeyDictionary()

    def count(self, backward: int) -> int:
        """Return the number of the microbatch that the engine's backward of this number is."""
        if backward != self.backward:
            self.number, self.backward = self.number + 1, backward
        return self.number

    def begin(self) -> None:
        """Begin a new step with the current microbatch."""
        self.first = self.number
        self.calls.clear()


_STEPS: weakref.WeakKeyDictionary[Root, _Step] = weakref.WeakKeyDictionary()


def invariant_gradients(main_weight: DBuffer, spec: GroupSpec, fsdp_params: FSDPParams) -> GradientBuffer:
    """Return the gradient buffers of one parameter group; every backward exchanges them, for each strategy."""
    dtypes, placements = spec.dtypes, spec.placements
    partial: tuple[BufferPlacement, ...] = (Partial("sum"),) * len(placements.gradient)
    device, stepped = spec.compute_device, placements.optimizer
    packed = gradient_buffer(main_weight, spec, partial, dtypes.reduce, "packed gradients", device)
    main_grad = gradient_buffer(main_weight, spec, stepped, dtypes.main_grad, "main_grad", main_weight.device)
    reduction = InvariantReduction(packed, main_grad, fsdp_params)
    gradients = GradientBuffer(main_weight, spec, fsdp_params, reduction, None)
    # Slices of replicated gradients are gathered in place. clip_grad_norm_ needs norms that do not depend on the ranks.
    gradients.binding.memory.is_sent_last = gradients.binding.has_exact_norms = True
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_refuse_fused))
    return gradients


class InvariantReduction:
    """Exchanges packed gradients, adds them in a ``BinaryCounter`` and writes the sum into ``main_grad``.

    Implements ``GradientReduction``.

    Args:
        packed: buffer that autograd writes gradients to.
        main_grad: buffer that the optimizer reads.
        fsdp_params: the parameters of the group.

    Attributes:
        unit: weak reference to the group's unit; None until the unit is created.
    """

    def __init__(self, packed: DBuffer, main_grad: DBuffer, fsdp_params: FSDPParams) -> None:
        self.packed, self.main_grad, self.final = packed, main_grad, main_grad
        self.wide: DBuffer | None = None
        self.wire: Wire | None = None
        self.hook: Hook | None = None
        self.function: ReduceFunction | None = None
        self.rests_partial = self.rests_final = False
        self.keeps = self.frees_packed = self.adds_on_host = False
        # The last sum is followed by a gather.
        self.finishes_on_lane = False
        self.unit: weakref.ref[Unit] | None = None
        self._params, self._scale = fsdp_params, 1.0
        self.counter = BinaryCounter(torch.promote_types(torch.float32, packed.dtype), packed.name)
        # The last sum of microbatches, and the version of ``main_grad`` after it was written.
        self._sum: Accumulation | None = None
        self._version = -1
        axes, sizes = packed.axes, [axis.size for axis in packed.axes]
        order = cut_order(sizes, main_grad.placements)
        self._whole = [axes[index] for index in order if main_grad.placements[index] != Flat()]
        self._axis = axes[order[0] if len(order) == 1 else 0]
        self._num_ranks = math.prod(sizes)
        # The slice that each rank sums, in the order of ranks.
        places = itertools.product(*map(range, sizes))
        self._pieces = [owned_piece(packed.plan.numel, sizes, order, place) for place in places]
        room = (self._num_ranks - 1) * max(piece.stop - piece.start for piece in self._pieces)
        self._received = FlatStorage(room, packed.dtype, packed.device, name="gradients that others sent")

    def _unit(self) -> Unit | None:
        return None if self.unit is None else self.unit()

    def begin_sum(self, binding: GradBinding) -> Accumulation:
        """Begin or continue a sum of microbatches.

        Raises:
            StateError: ``no_sync`` would add up microbatches on this rank first, or the user changed the sum since
                the last microbatch, other than setting it to zero.
        """
        unit = self._unit()
        if unit is not None and not unit.requires_gradient_sync:
            raise StateError(
                f"{binding.name}: no_sync() or set_requires_gradient_sync(False) adds the microbatches of one rank "
                f"first, but {_FLAG} adds the microbatches of all ranks one by one. fix: remove it; "
                "set_is_last_backward(False) says that more microbatches follow"
            )
        if binding.sum is None and self._sum is not None:
            # ``begin_sum`` continues the last sum, and writes zeros for parameters without ``.grad``. Those had none.
            for gradient, is_wanted, is_missing in zip(
                grads_of(binding.parameters), self._sum.covered, self._sum.missing, strict=True
            ):
                self._version += gradient is None and (is_missing or not is_wanted)
        self._sum = binding.begin_sum()
        self._look_for_changes(binding, self._sum)
        return self._sum

    def prepare(self, scale: float, *, overwrites: bool) -> None:
        """Count this microbatch and allocate the receive buffer, until ``release``.

        Raises:
            StateError: no divisor was set, or the forward has had its backward in this step.
        """
        unit = self._unit()
        assert unit is not None
        step = _STEPS.setdefault(unit.root, _Step())
        number = step.count(unit.root.backward.number)
        if overwrites:
            if step.last.get(self._params, 0) >= step.first:
                # The user dropped this step's sum, or the optimizer has stepped: a new step begins.
                step.begin()
            self.counter.clear()
        step.last[self._params] = number
        call = unit.root.backward.oldest_calls.get(unit.reference)
        if call is not None and step.calls.setdefault(call, number) != number:
            raise StateError(
                f"{self.packed.name}: this is the second backward of one forward, and {_FLAG} numbers the microbatches "
                "of all ranks by their backwards, so the order of additions would depend on the number of ranks. "
                "fix: add the losses of a forward and call backward() once, or run a forward for each"
            )
        self._begin_microbatch(number - step.first)
        if scale == 0.0:
            raise StateError(
                f"{self.packed.name}: {_FLAG} divides once, after the last addition, by a number that must not depend "
                "on the number of ranks. fix: call set_gradient_divide_factor(G) on every unit, where G is the number "
                "of microbatches of a step on all ranks together, and do not divide the losses"
            )
        self._scale = scale
        self._version = self.main_grad.local_buffer._version

    def _begin_microbatch(self, microbatch: int) -> None:
        """Add zeros for the microbatches of this step in which no rank used the group."""
        if self._axis.size < self._num_ranks:
            # Created here because all ranks reach this line in the same backward.
            group = flattened_mesh(self.packed.mesh).get_group()
            self._axis = MeshAxis(self._axis.name, self._num_ranks, dist.get_rank(group), group)
            make_groups([self._axis])
        piece, packed = self._pieces[self._axis.rank], self.packed
        zeros = torch.zeros((), dtype=packed.dtype, device=packed.device).expand(piece.stop - piece.start)
        while self.counter.count < microbatch * self._num_ranks:
            self.counter.push(zeros)
        self._received.reallocate()

    def release(self) -> None:
        """Release the receive buffer after its contents were added."""
        self._received.release()

    def keep(self, keeps: bool) -> None:
        """Set ``keeps``; the receive buffer is released between uses in any case."""
        self.keeps = keeps
        self.release()

    def release_all(self) -> None:
        """Release the receive buffer."""
        self.release()

    def start(self, works: list[dist.Work] | None) -> list[Part]:
        """Issue the exchange."""
        all_to_all_tensors(*self._rows(), self._axis, works)
        return []

    def fold(self) -> None:
        """Add the received slices to the sum."""
        self.counter.push(*self._rows()[0])

    def fold_on_host(self) -> None:
        """Do nothing: the sums are on the device of the gradients."""

    def complete_last(self) -> None:
        """Do nothing: ``start_last`` has written the sum to ``main_grad``."""

    def _rows(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the slices that this rank adds, one per rank, and the slices that it sends, one per rank."""
        sent = [self.packed.local_buffer[piece] for piece in self._pieces]
        mine, others = sent[self._axis.rank], self._num_ranks - 1
        rooms = self._received.tensor[: others * mine.numel()].view(others, mine.numel()).unbind()
        return [*rooms[: self._axis.rank], mine, *rooms[self._axis.rank :]], sent

    def start_last(self, works: list[dist.Work] | None) -> list[Part]:
        """Write the sum to ``main_grad`` and gather it over the axes that replicate ``main_grad``."""
        target = self.main_grad.local_buffer
        if listeners:
            tell("summing", self.main_grad)
        held = self._held(target)
        self.counter.write(held[-1], self._scale)
        for axis, whole in zip(reversed(self._whole), reversed(held[:-1]), strict=True):
            parts = [whole[piece_of(whole.numel(), axis.size, rank)] for rank in range(axis.size)]
            all_to_all_tensors(parts, [parts[axis.rank]] * axis.size, axis)
        self._version = target._version
        return []

    def _held(self, target: torch.Tensor) -> list[torch.Tensor]:
        """Return the slices of the target, one per replicated axis; the last one is the slice that this rank sums."""
        pieces = [target]
        for axis in self._whole:
            pieces.append(pieces[-1][piece_of(pieces[-1].numel(), axis.size, axis.rank)])
        return pieces

    def _look_for_changes(self, binding: GradBinding, under_way: Accumulation) -> None:
        """Start a new sum if the user set the current one, visible as ``.grad``, to zero.

        Raises:
            StateError: the user wrote other values into the current sum.
        """
        if not under_way.is_in_main_grad or binding.main_grad.local_buffer._version == self._version:
            return
        if binding.main_grad.local_buffer.any():
            raise StateError(
                f"{binding.name}: a gradient was changed between two microbatches, but {_FLAG} keeps the sum in "
                "another buffer, without the change. fix: change gradients after the last microbatch only; zero_grad() "
                "starts a new sum"
            )
        under_way.is_in_main_grad = False


def piece_of(numel: int, size: int, rank: int) -> slice:
    """Return the elements that one rank of an axis sums. The last ranks may have fewer elements, or none."""
    share = -(-numel // size)
    return slice(min(rank * share, numel), min((rank + 1) * share, numel))


def cut_order(sizes: Sequence[int], placements: Sequence[BufferPlacement]) -> list[int]:
    """Return the indices of the mesh axes that cut a buffer, from major to minor: sharded axes first."""
    axes = (index for index in range(len(sizes)) if sizes[index] > 1)
    return sorted(axes, key=lambda index: (placements[index] != Flat(), -index))


def owned_piece(numel: int, sizes: Sequence[int], order: Iterable[int], place: Sequence[int]) -> slice:
    """Return the elements of a buffer that the rank at these mesh coordinates sums."""
    start, length = 0, numel
    for index in order:
        piece = piece_of(length, sizes[index], place[index])
        start, length = start + piece.start, piece.stop - piece.start
    return slice(start, start + length)
