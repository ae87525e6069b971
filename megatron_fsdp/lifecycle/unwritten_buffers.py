"""Uninitialized buffers of a model that was built on the meta device.

A full state dictionary lacks non-persistent buffers (tables of rotary embeddings, masks), so loading it leaves them as
``to_empty`` allocated them. They are filled with NaN, or the smallest integer, to detect later that they are unset.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp.errors import StateError

__all__ = ["allocate_buffers", "is_to_empty", "meta_buffers", "move_buffers", "note_unwritten"]

_UNWRITTEN: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Buffers that were allocated and not written yet, and the version that each had then."""


def is_to_empty(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether ``function`` is the one that ``nn.Module.to_empty`` passes to ``_apply``."""
    return getattr(function, "__qualname__", "").startswith("Module.to_empty.")


def meta_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the places of buffers on the meta device."""
    return [
        (child, name)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and buffer.is_meta
    ]


def move_buffers(places: Iterable[tuple[nn.Module, str]], device: torch.device) -> None:
    """Put newly allocated buffers on a device."""
    for child, name in places:
        buffer = child._buffers[name]
        if buffer is not None and not buffer.is_meta:
            child._buffers[name] = buffer.to(device)


def note_unwritten(root: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> None:
    """Fill new buffers with NaN; the first forward of ``root`` warns about those still unset."""
    allocated = [buffer for child, name in places if (buffer := child._buffers[name]) is not None]
    for buffer in allocated:
        mark = _mark_of(buffer)
        if mark is not None and not buffer.is_meta and buffer not in _UNWRITTEN:
            with torch.no_grad():
                buffer.fill_(mark)
            _UNWRITTEN[buffer] = buffer._version
    if allocated:
        _call_once(root, _warn_of_unwritten)


def allocate_buffers(root: nn.Module, names: Collection[str], prefix: str, device: torch.device) -> None:
    """Allocate meta-device buffers that a state dictionary fills; a forward raises while others remain.

    Args:
        names: the keys of the state dictionary. prefix: of ``root`` in these.
    """
    paths = {id(module): f"{prefix}{path}." if path else prefix for path, module in root.named_modules()}
    places = meta_buffers(root)
    for child, name in places:
        if paths[id(child)] + name in names:
            child._buffers[name] = torch.empty_like(child._buffers[name], device=device)  # type: ignore[arg-type]
    if places:
        _call_once(root, _refuse_meta)


def _mark_of(buffer: torch.Tensor) -> float | int | None:
    if buffer.is_floating_point() or buffer.is_complex():
        return float("nan")
    return None if buffer.dtype is torch.bool else torch.iinfo(buffer.dtype).min


def _is_unwritten(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is unset. Compares values too, because writes through ``.data`` are not counted."""
    if _UNWRITTEN.get(buffer) != buffer._version:
        return False
    has_nan = buffer.is_floating_point() or buffer.is_complex()
    is_marked = buffer.isnan() if has_nan else buffer.eq(torch.iinfo(buffer.dtype).min)
    return bool(is_marked.all())


def _call_once(root: nn.Module, look: Callable[[nn.Module], None]) -> None:
    """Call ``look`` when ``root`` is first called."""
    handles: list[Any] = []

    def before_forward(module: nn.Module, *_: Any) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        look(module)

    handles.append(root.register_forward_pre_hook(before_forward))


def _warn_of_unwritten(root: nn.Module) -> None:
    found = []
    for name, buffer in root.named_buffers():
        if buffer in _UNWRITTEN:
            if _is_unwritten(buffer):
                found.append(name)
            del _UNWRITTEN[buffer]
    if found:
        warnings.warn(
            f"{type(root).__name__}: buffers {', '.join(map(repr, found))} were allocated by to_empty or materialize "
            "and nobody wrote them: they are NaN, or the smallest integer. State dictionaries have no non-persistent "
            "buffers. fix: write them after to_empty, by the module's reset_parameters() or by what its constructor "
            "does (module.inv_freq = ...); or build the model with buffers off the meta device.",
            stacklevel=4,
        )


def _refuse_meta(root: nn.Module) -> None:
    found = [name for name, buffer in root.named_buffers() if buffer.is_meta]
    if found:
        _call_once(root, _refuse_meta)
        raise StateError(
            f"{type(root).__name__}: buffers {', '.join(map(repr, found))} are on the meta device: the state "
            "dictionary that was loaded has none of these names (non-persistent buffers are never in one). fix: before "
            "load_state_dict call model.to_empty(device=...) or materialize(model), and write these buffers after it "
            "(module.inv_freq = ...); or build the model with buffers off the meta device."
        )
