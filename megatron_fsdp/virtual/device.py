"""VirtualDevice: the stand-in for a GPU and its job while a training step is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dbuffer.events import listen
from dbuffer_kernels.launch import launch_with
from megatron_fsdp.engine.streams import drive_with
from megatron_fsdp.virtual.address_space import large_storages
from megatron_fsdp.virtual.operators import Operators, tensors_in
from megatron_fsdp.virtual.process_group import virtual_world
from megatron_fsdp.virtual.recording import Recording, Work

__all__ = ["VirtualDevice", "virtual_device"]


class VirtualDevice:
    """A recorder of steps of a model that was built on it."""

    def __init__(self, collective_calls: int) -> None:
        self.recording = Recording(is_on=False, collective_calls=collective_calls)
        self._units: dict[int, str] = {}

    def record(self, step: Callable[[], object], warmup: int = 2) -> Recording:
        """Return the recording of one step, after ``warmup`` steps that are not recorded."""
        for _ in range(warmup):
            step()
        self.recording.items.clear()
        self.recording.is_on = True
        step()
        self.recording.is_on = False
        return self.recording

    def hear(self, action: str, subject: Any) -> None:
        """Record the model's current unit, and the purpose of a lane's work."""
        if action in ("use", "gather", "reduce", "closed"):
            self._units[id(subject)] = subject.name
        if action == "use":
            self.recording.unit = self._units[id(subject)]
        elif action == "enter":
            unit = subject._unit()
            self.recording.unit = self._units.get(id(unit), "")
        elif action == "collective":
            self.recording.axis = subject.axis
        elif action == "issue":
            what = "gather" if subject.lane == "gather" else "reduction"
            name = self._units.get(subject.owner, "")
            self.recording.labels[self.recording.current().name] = f"{what} of {name}"

    def launch(self, kernel: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Record a kernel of this library, which reads or writes each of its tensors once."""
        num_bytes = sum(tensor.nbytes for tensor in tensors_in(arguments))
        name = kernel.__name__
        if name == "pack_kernel":
            # The only tensor is the table of copies; each copied byte is read and written.
            num_bytes = 2 * sum(arguments[0][-3::-4].tolist())
        self.recording.work(Work(name, "memory", 0, num_bytes, label=self.recording.label()))


@contextlib.contextmanager
def virtual_device(
    num_ranks: int,
    rank: int = 0,
    *,
    has_streams: bool = True,
    collective_calls: int = 20,
    parts: Mapping[Any, Callable[..., Any]] | None = None,
) -> Iterator[VirtualDevice]:
    """Make this thread one rank of a job on virtual devices while the block runs; models are made inside of it.

    Tensors are CPU tensors whose large operators are not computed, so their values are meaningless.

    Args:
        has_streams: it stands for a GPU. False: for a CPU, which does everything itself, one after the other, as it
            does where each rank has a core.
        collective_calls: the host's time around a collective, an engine's Python above all, in calls of operators.
        parts: as ``Operators`` takes them.
    """
    device = VirtualDevice(collective_calls)
    with contextlib.ExitStack() as stack:
        stack.enter_context(virtual_world(num_ranks, rank))
        stack.enter_context(large_storages())
        if has_streams:
            stack.enter_context(drive_with(device.recording))
            stack.enter_context(launch_with(device.launch))
        else:
            stack.enter_context(device.recording.on_host())
        stack.enter_context(listen(device.hear))
        stack.enter_context(Operators(device.recording, parts))
        yield device
