"""The log of the null CUDA machine (``c/log.c``), and a process that is one rank of a job of any size there."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but untyped

LIBRARY = ctypes.CDLL(os.environ["NULLCUDA"])


class _Entry(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in "kind capture stream object a b c d".split()]


LIBRARY.nullcuda_entries.restype = ctypes.POINTER(_Entry)
LIBRARY.nullcuda_size.restype = ctypes.c_uint64
LIBRARY.nullcuda_kind.restype = ctypes.c_char_p
LIBRARY.nullcuda_stream_id.argtypes = [ctypes.c_void_p]
LIBRARY.nullcuda_stream_id.restype = ctypes.c_uint64
LIBRARY.nullcuda_launch.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
KINDS = [LIBRARY.nullcuda_kind(number).decode() for number in range(20)]


@dataclass(frozen=True, slots=True)
class Call:
    """A call into CUDA, cuBLAS or NCCL.

    Attributes:
        kind: a name of ``c/log.c``. capture: the number of the graph's capture it belongs to, 0 for none.
        object: and ``values``: documented in the C file that logs this kind.
    """

    kind: str
    capture: int
    stream: int
    object: int
    values: tuple[int, int, int, int]

    @property
    def text(self) -> str:
        """The name of the call that CUDA refused."""
        found = ctypes.cast(self.values[0], ctypes.c_char_p).value
        return (found or b"").decode()


def log_size() -> int:
    """Return how many calls have been logged."""
    return int(LIBRARY.nullcuda_size())


def calls(start: int = 0) -> list[Call]:
    """Return the calls that were logged, from one on."""
    entries = LIBRARY.nullcuda_entries()
    found = (entries[i] for i in range(start, log_size()))
    return [Call(KINDS[e.kind], e.capture, e.stream, e.object, (e.a, e.b, e.c, e.d)) for e in found]


def stream_id(stream: torch.Stream) -> int:
    """Return a stream's number in the log."""
    return stream_id_of_handle(stream.native_handle)  # type: ignore[attr-defined]  # not in torch's stubs


def stream_id_of_handle(handle: int) -> int:
    """Return the number in the log of the stream with this address, which CUDA calls its handle."""
    return int(LIBRARY.nullcuda_stream_id(handle))


@contextmanager
def logged() -> Iterator[None]:
    """Start an empty log, and keep it while the block runs."""
    LIBRARY.nullcuda_clear()
    LIBRARY.nullcuda_log(1)
    try:
        yield
    finally:
        LIBRARY.nullcuda_log(0)


def become_rank_0_of(world_size: int) -> None:
    """Leave the test's own process group; be one rank of a job on NCCL whose other ranks do not exist."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    # cuDNN has no kernels here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=world_size, device_id=device)
