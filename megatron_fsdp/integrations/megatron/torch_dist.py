"""Load checkpoints in the ``torch_dist`` format of Megatron's DDP and its distributed optimizer.

Megatron's modules describe where their weights lie in the whole model. This file replaces sharded parameters by meta
tensors of whole shapes, calls the model's ``sharded_state_dict``, and cuts the boxes of this rank's shards out of the
result. megatron.core is imported on first use.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_fsdp.checkpoint.parts import Part, pieces_of
from megatron_fsdp.checkpoint.ranks import checkpoint_ranks
from megatron_fsdp.errors import CheckpointError, ConfigError
from megatron_fsdp.integrations.megatron.checkpoint import innermost, owners_of
from megatron_fsdp.optim.loaded_state import parameters_of

__all__ = ["load_torch_dist"]

# Names of main weights in the distributed optimizer and in the optimizer of whole tensors.
_MAIN_NAMES = ("param", "fp32_param")
_STATE = re.compile(r"^(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)$")
_BY_BUCKET = re.compile(r"optimizer\.distributed\.")
# Settings that identify a param group of Megatron's optimizers.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")
_MAX_LISTED = 5
# Metadata by which Megatron's modules choose names for layers and gates.
_LAYOUT_KEYS = ("non_homogeneous_layers", "singleton_local_shards")
# Megatron's ShardedTensors without values, by (name of the optimizer's state, or nothing; weight).
_Found = Mapping[tuple[str, str], Any]


class _Region(NamedTuple):
    """A box of a parameter: Megatron's ShardedTensor, and the box's offsets in this rank's whole parameter."""

    entry: Any
    start: tuple[int, ...]


class _Layout(NamedTuple):
    """The layout of this rank's chunks according to Megatron: boxes by parameter id; buffers and objects by name."""

    regions: dict[int, list[_Region]]
    others: dict[str, Any]


def load_torch_dist(chunks: Sequence[Any], optimizer: Any, folder: str | Path) -> dict[str, Any]:
    """Load a checkpoint of Megatron's DDP, saved on any number of ranks. Every rank calls this function.

    Reads FP32 main weights if the checkpoint has them, otherwise the model's weights.

    Args:
        chunks: this rank's ``ShardedDataParallel`` wrappers, in a list.
        optimizer: optimizer from ``get_megatron_optimizer``. None: load weights only.
        folder: a ``torch_dist`` checkpoint, such as ``iter_0000100``.
    Returns:
        The other entries of the checkpoint, such as ``iteration`` and ``args``.
    Raises:
        CheckpointError: the checkpoint lacks weights or optimizer state of this model, or its optimizer state has a
            format that depends on the buckets of the run that saved it.

    Example:
        load_torch_dist([model], optimizer, "checkpoints/iter_0000100")
    """
    from megatron.core import dist_checkpointing

    described = None if optimizer is None else optimizer.sharded_state_dict(is_loading=True)
    layout, wanted = _Layout({}, {}), []

    def plan() -> None:
        nonlocal layout, wanted
        found = _names_in(str(folder))
        layout = _layout_as_saved(chunks, found, str(folder))
        parameters: Iterable[tuple[nn.Parameter, Mapping[str, Any]]]
        parameters = ((parameter, {}) for chunk in chunks for parameter in chunk.module.parameters())
        if described is not None:
            parameters = _states(optimizer, described)
        wanted = [target for parameter, state in parameters for target in _wanted(layout, parameter, state, found)]

    # If one rank finds a tensor missing, all ranks raise. Otherwise they would wait for that rank.
    checkpoint_ranks("calls load_torch_dist").check(f"loading {folder}", plan)
    buffers = {name: entry for name, entry in layout.others.items() if isinstance(entry.data, torch.Tensor)}
    numbered = {str(number): entry for number, (entry, _) in enumerate(wanted)}
    loaded = dist_checkpointing.load(
        {"weights": numbered, "others": buffers}, str(folder), validate_access_integrity=False
    )
    with torch.no_grad():
        for number, (_, target) in enumerate(wanted):
            target.copy_(loaded["weights"][str(number)].view(target.shape))
    if described is not None:
        groups = list(_groups_in(loaded["optimizer"]))
        for name, values in described["param_to_group_meta"].items():
            group, step = _group_of(name, values, groups)
            values.update({key: group[key] for key in values if key in group and key not in _GROUP_KEYS})
            if step is not None:
                values["step"] = int(step)
        optimizer.load_state_dict(described)
    for chunk in chunks:
        chunk.module.install_optimized_model_weights()
    return {key: value for key, value in loaded.items() if key not in ("weights", "others", "optimizer")}


# ---------------------------------------------------------------------- the layout of Megatron's modules


def _layout_as_saved(chunks: Sequence[Any], found: _Found, folder: str) -> _Layout:
    """Return the layout whose names are in the checkpoint: layers stacked or numbered, gates in one tensor or two."""
    from megatron.core import dist_checkpointing

    saved = dist_checkpointing.load_content_metadata(folder)
    kinds = [{name: value for name, value in saved.items() if name in _LAYOUT_KEYS}] if saved else []
    kinds += [dict(zip(_LAYOUT_KEYS, kind, strict=True)) for kind in ((False, False), (True, False), (True, True))]
    group = chunks[0].module.model_groups.data
    layouts = [_layout(chunks, {"singleton_local_shards": False, **kind, "dp_cp_group": group}) for kind in kinds]
    regions = [itertools.chain(*layout.regions.values()) for layout in layouts]
    missing = [sorted({each.entry.key for each in own if ("", each.entry.key) not in found}) for own in regions]
    for layout, names in zip(layouts, missing, strict=True):
        if not names:
            return layout
    raise CheckpointError(
        f"{folder} has no {', '.join(min(missing, key=len)[:_MAX_LISTED])}: it is of another model than this one. fix: "
        "give the folder of a checkpoint of this model"
    )


def _layout(chunks: Sequence[Any], metadata: dict[str, Any]) -> _Layout:
    """Return the layout that the modules' ``sharded_state_dict`` describes."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    layout = _Layout({}, {})
    for number, chunk in enumerate(chunks):
        model: Any = innermost(chunk)
        with _shapes_alone(model) as parameters:
            entries = model.sharded_state_dict(metadata=metadata)
        for name, entry in entries.items():
            built = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
            for part in tree_leaves(built):
                data = part.data
                is_own = isinstance(data, torch.Tensor) and data.is_meta and not isinstance(part, ShardedObject)
                if not is_own:
                    layout.others[f"{number}.{name}"] = part
                    continue
                parameter, shape = parameters[data.untyped_storage()._cdata]
                layout.regions.setdefault(id(parameter), []).append(_Region(part, _start(name, data, shape)))
    return layout


@contextlib.contextmanager
def _shapes_alone(model: nn.Module) -> Iterator[dict[int, tuple[nn.Parameter, torch.Tensor]]]:
    """Replace a model's parameters by meta tensors inside the block.

    Yields:
        The pairs (parameter, meta tensor), by the identity of the meta tensor's storage.
    """
    # The hooks of state_dict() put the sharded parameters back, so call them before replacing these.
    model.state_dict()
    places = [
        (part, name, parameter)
        for part in model.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    made: dict[int, nn.Parameter] = {}
    found: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
    try:
        for part, name, parameter in places:
            if id(parameter) not in made:
                shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
                found[made[id(parameter)].untyped_storage()._cdata] = (parameter, made[id(parameter)])
            part._parameters[name] = made[id(parameter)]
        yield found
    finally:
        for part, name, parameter in places:
            part._parameters[name] = parameter


def _start(name: str, box: torch.Tensor, whole: torch.Tensor) -> tuple[int, ...]:
    """Return the offsets of a box, which is a view of a contiguous tensor.

    Raises:
        ConfigError: the view is not a box.
    """
    start, left = [], int(box.storage_offset())
    for stride in whole.stride():
        position, left = divmod(left, stride)
        start.append(position)
    is_box = box.ndim == whole.ndim and all(
        ours == theirs or size == 1 for ours, theirs, size in zip(box.stride(), whole.stride(), box.shape, strict=True)
    )
    if not is_box:
        raise ConfigError(
            f"{name}: Megatron saves it as a tensor of shape {tuple(box.shape)} that is no box of the parameter's "
            f"{tuple(whole.shape)}. fix: save this model with torch.distributed.checkpoint (fsdp_dtensor)"
        )
    return tuple(start)


# ---------------------------------------------------------------------- boxes


def _boxes(layout: _Layout, parameter: nn.Parameter, value: torch.Tensor) -> Iterator[tuple[Any, tuple[int, ...], Any]]:
    """Yield (Megatron's entry, offsets in the entry's whole tensor, view) for each piece of a value on this rank."""
    source = value.source if isinstance(value, Part) else value
    for region in layout.regions[id(parameter)]:
        entry = region.entry
        axes = len(entry.global_shape) - len(entry.local_shape)
        for offsets, local in pieces_of(source):
            view, place = local, list(entry.global_offset)
            for dim, (first, begin) in enumerate(zip(offsets, region.start, strict=True)):
                low = max(first, begin)
                high = min(first + local.shape[dim], begin + entry.local_shape[dim])
                view = view.narrow(dim, low - first if high > low else 0, max(high - low, 0))
                place[axes + dim] += low - begin
            if view.numel():
                yield entry, tuple(place), view.view((1,) * axes + tuple(view.shape))


def _entry(key: str, entry: Any, place: tuple[int, ...], data: torch.Tensor) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    # The last value, None, means no grid: boxes of a flat buffer's rows have unequal sizes.
    shapes = tuple(data.shape), tuple(entry.global_shape), place, None
    return ShardedTensor(key, data, data.dtype, *shapes, allow_shape_mismatch=entry.allow_shape_mismatch)


def _wanted(
    layout: _Layout, parameter: nn.Parameter, state: Mapping[str, Any], found: _Found
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield pairs for a parameter and its state: the ShardedTensor to read, and the view to write it to."""
    keys = [region.entry.key for region in layout.regions[id(parameter)]]
    main = next((name for name in _MAIN_NAMES if all((name, key) in found for key in keys)), "")
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}
    for name, value in {main: parameter, **tensors}.items():
        for region in layout.regions[id(parameter)]:
            _check(name, region.entry, found)
        for entry, place, view in _boxes(layout, parameter, value):
            read = _entry(found[name, entry.key].key, entry, place, torch.empty_like(view))
            yield read, view.detach()


def _check(name: str, entry: Any, found: _Found) -> None:
    saved = found.get((name, entry.key))
    if saved is None:
        raise CheckpointError(
            f"the checkpoint has no {f'{name} of ' if name else ''}{entry.key}: it is of another model or optimizer. "
            + ("fix: optimizer=None loads weights only" if name else "fix: give the folder of this model's checkpoint")
        )
    if tuple(saved.global_shape) != tuple(entry.global_shape) and not entry.allow_shape_mismatch:
        raise CheckpointError(
            f"{entry.key} has shape {tuple(saved.global_shape)} in the checkpoint and {tuple(entry.global_shape)} in "
            "this model. fix: give the folder of this model's checkpoint"
        )


def _names_in(folder: str) -> _Found:
    """Return the checkpoint's tensors by (name of the optimizer's state, or nothing for weights; weight)."""
    from megatron.core import dist_checkpointing

    found = {}
    for key, tensor in dist_checkpointing.load_tensors_metadata(folder).items():
        if _BY_BUCKET.search(key):
            raise CheckpointError(
                f"{folder} has optimizer state in the buckets of the run that saved it ({key}), which only that run "
                "can read. fix: save with --dist-ckpt-optim-fully-reshardable (distrib_optim_sharding_type "
                "'fully_reshardable')"
            )
        match = _STATE.match(key)
        found[(match[1], match[2]) if match else ("", key)] = tensor
    return found


# ---------------------------------------------------------------------- the optimizer


def _states(optimizer: Any, described: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield each parameter with its state."""
    inner = optimizer.optimizer
    parameters = list(parameters_of(inner))
    for index, owner in owners_of(optimizer._chunks, inner).items():
        yield parameters[index], described["state"].get(owner.name, {})


def _groups_in(document: Any, step: Any = None) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Yield (group, step) for each of a checkpoint's optimizers, at any depth of nesting."""
    if not isinstance(document, Mapping):
        return
    step = document.get("state", {}).get("common_step", step) if isinstance(document.get("state"), Mapping) else step
    for group in document.get("param_groups", ()):
        yield group, group.get("step", step)
    for key, value in document.items():
        if isinstance(key, int) or key == "optimizer":
            yield from _groups_in(value, step)


def _group_of(
    name: str, values: Mapping[str, Any], groups: Sequence[tuple[Mapping[str, Any], Any]]
) -> tuple[Mapping[str, Any], Any]:
    """Return the saved group, and its step, with the same settings as a parameter's group.

    ``is_expert_parallel`` may differ: experts on one rank are counted among dense weights.
    """
    wanted, keys = _key_of(values), [_key_of(group) for group, _ in groups]
    alike = [number for number, key in enumerate(keys) if key[:-1] == wanted[:-1]]
    if not alike:
        raise CheckpointError(
            f"{name}: the checkpoint has no group of parameters with {dict(zip(_GROUP_KEYS, wanted, strict=True))}, it "
            f"has {keys}. fix: use the weight decay and learning rate multipliers of the run that saved it"
        )
    return groups[next((number for number in alike if keys[number] == wanted), alike[0])]


def _key_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    # NeMo calls the first two pre_wd_mult and pre_lr_mult.
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _GROUP_KEYS)
