"""Reads: collectives of operators on sharded tensors, on their own communicator, after a check that all ranks agree.

If only one rank calls such an operator (``if rank == 0: log(p.norm().item())``), its collective must not pair with a
gather of the engine or with another read. On CPUs the ranks therefore first exchange 8 bytes, a digest of what each is
about to read; all of them see whether the digests differ. On other devices the host would have to wait for this
exchange, so there only the separate communicator protects reads.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dbuffer.collectives.all_gather import all_gather, all_gather_uneven, start_status_gather
from dbuffer.collectives.all_reduce import all_reduce
from dbuffer.collectives.parts import is_traced
from dbuffer.collectives.waits import waiters
from dbuffer.errors import ReadError
from dbuffer.mesh import MeshAxis, job_timeout
from dbuffer.whereabouts import SOON, is_from_backend, others_stand, place, reason_of, wait_longer

NAMERS: list[Callable[[DTensor], str | None]] = []
"""Functions that return the name of a parameter or of a parameter's gradient; None for an unknown tensor."""

# How many optimizer steps this rank has begun over parameters on a communicator.
_NUM_STEPS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_WORDS_BYTES = 512
_FIX = (
    "fix: let every rank of the mesh make this call, and print or save on one of them: value = p.norm(), then `if rank "
    "== 0: log(value.item())`; or read p.to_local(), this rank's rows, which needs no other rank"
)


def read_gather(output: torch.Tensor, shard: torch.Tensor, axis: MeshAxis, of: DTensor | str | None = None) -> None:
    """Run ``all_gather`` for an operator.

    Args:
        of: the tensor that is read, or a description of it; it is compared across ranks and named in errors.
    Raises:
        ReadError: on all ranks if they read different tensors; on this rank if another rank does not read.
    """
    _read("all of", output, axis, of, (), lambda axis, works: all_gather(output, shard, axis, works))


def read_gather_uneven(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], axis: MeshAxis, of: DTensor | str | None = None
) -> None:
    """Run ``all_gather_uneven`` for an operator: parts of ``whole``, one per rank. See ``read_gather``."""
    sizes = tuple(part.numel() for part in parts)
    _read("all of", whole, axis, of, sizes, lambda axis, works: all_gather_uneven(parts, axis, works))


def read_reduce(tensor: torch.Tensor, axis: MeshAxis, op: str, of: DTensor | str | None = None) -> None:
    """Run ``all_reduce`` for an operator; see ``read_gather``."""
    _read(f"a {op} over", tensor, axis, of, (), lambda axis, works: all_reduce(tensor, axis, op, works))


def reduce_norm(tensor: torch.Tensor, axis: MeshAxis, op: str, of: DTensor | str) -> None:
    """Run ``all_reduce`` on partial norms of gradients, without comparing the reads of the ranks.

    Training clips gradients in every step, so this issues a single collective. On devices other than CPUs it runs on
    the engine's own communicator, because another communicator would take memory. On CPUs an all-reduce never pairs
    with another kind of collective, and gathers run between the norms of two steps. A norm that only one rank takes
    therefore waits until the timeout, instead of pairing wrongly.
    """
    if axis.size == 1 or is_traced(tensor) or not tensor.is_cpu:
        all_reduce(tensor, axis, op)
        return
    name = of if isinstance(of, str) else f"norms of {_name_of(of)} and other gradients"
    _issue(axis.of_operators, name, lambda axis, works: all_reduce(tensor, axis, op, works))


def count_step(groups: Iterable[dist.ProcessGroup]) -> None:
    """Count an optimizer step for these communicators, so that reads before and after it have different digests."""
    for group in groups:
        _NUM_STEPS[group] = _NUM_STEPS.get(group, 0) + 1


def _read(
    kind: str,
    tensor: torch.Tensor,
    axis: MeshAxis,
    of: DTensor | str | None,
    sizes: tuple[int, ...],
    issue: Callable[[MeshAxis, Any], None],
) -> None:
    if axis.size == 1 or is_traced(tensor) or not tensor.is_cpu:
        issue(axis.of_operators, None)
        return
    num_steps = _NUM_STEPS.get(axis.gather_group, 0)
    axis = axis.of_operators
    what = f"{kind} {_name_of(of)}"
    said = (what, num_steps, tensor.numel(), str(tensor.dtype), sizes)
    _compare(axis, zlib.crc32(repr(said).encode()), what, num_steps)
    _issue(axis, what, issue)


def _issue(axis: MeshAxis, what: str, issue: Callable[[MeshAxis, Any], None]) -> None:
    works: list[dist.Work] = []
    try:
        issue(axis, works)
        for work in works:
            if waiters:
                waiters[-1](work)
                continue
            try:
                work.wait(SOON)
            except RuntimeError:
                wait_longer(work, what)
    except RuntimeError as error:
        _raise_alone(axis, what, error)


def _compare(axis: MeshAxis, digest: int, what: str, num_steps: int) -> None:
    """Raise on every rank if any two ranks are about to read different tensors."""
    if not axis.gathers_by_gloo:
        return
    with torch.inference_mode(False):
        mine = torch.tensor([digest], device="cpu")
        found = torch.empty(axis.size, dtype=torch.int64, device="cpu")
        _issue(axis, what, lambda axis, works: works.append(start_status_gather(found, mine, axis.gather_group)))
        if all(each == digest for each in found.tolist()):
            return
        words = f"{what} after {num_steps} optimizer steps, {place()}".encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES)
        sent = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        heard = torch.empty(axis.size * _WORDS_BYTES, dtype=torch.uint8, device="cpu")
        _issue(axis, what, lambda axis, works: works.append(start_status_gather(heard, sent, axis.gather_group)))
    ranks = dist.get_process_group_ranks(axis.gather_group)
    texts = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in heard.view(axis.size, -1)]
    sides = "; ".join(f"rank {rank} reads {text}" for rank, text in zip(ranks, texts, strict=True))
    raise ReadError(f"the ranks of a mesh read different things of sharded tensors at one time: {sides}. {_FIX}")


def _raise_alone(axis: MeshAxis, what: str, error: RuntimeError) -> NoReturn:
    if isinstance(error, ReadError) or not is_from_backend(error):
        raise error
    ranks = dist.get_process_group_ranks(axis.gather_group)
    raise ReadError(
        f"rank {dist.get_rank()} reads {what}, {place()}, which ranks {ranks} have to do together, but "
        f"{reason_of(error, job_timeout())}: {others_stand(ranks)}. {_FIX}"
    ) from error


def _name_of(tensor: DTensor | str | None) -> str:
    if not isinstance(tensor, DTensor):
        return tensor or "a sharded tensor"
    for namer in NAMERS:
        name = namer(tensor)
        if name is not None:
            return name
    meta: Any = tensor._spec.tensor_meta
    return f"a tensor of shape {tuple(meta.shape)}"
