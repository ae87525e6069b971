"""FsdpConfig: the flags as one checked object, and the arguments of ``fully_shard`` that follow from them."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Partial, Replicate
from megatron_fsdp.config.flag_rules import RULES
from megatron_fsdp.config.flags import FLAGS, Flag, FlagValues, flag_of
from megatron_fsdp.config.hf_settings import HfSettings, read_hf_settings
from megatron_fsdp.engine.unit import Unit, units_below
from megatron_fsdp.errors import ConfigError, StateError, nearest
from megatron_fsdp.lifecycle.module import FSDPModule, unit_of
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.variants.forward_order import share_forward_order
from megatron_fsdp.variants.memory_slots import use_slots

__all__ = ["FsdpConfig", "prefetch_elements"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Megatron stores FP8 optimizer state as bytes.
DTYPE_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.uint8: "fp8"}
_ALWAYS_SAID = ("data_parallel_sharding_strategy", "num_distributed_optimizer_instances")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig(FlagValues):
    """Megatron-LM's FSDP flags, checked. docs/flags.md lists the meaning and effect of each.

    Fields have the names of the flags' attributes and Megatron's defaults, except ``use_megatron_fsdp``, which is True
    because the other flags need it. Dtypes may also be ``torch.dtype``, as Megatron's own parser returns them.

    Raises:
        ConfigError: a field is unknown (the error names the nearest one), a value has the wrong type or is not a legal
            choice, or fields contradict each other (the error names both flags).

    Example:
        config = FsdpConfig(data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_bf16=True, bf16=True)
        fully_shard(model, mesh, **config.fully_shard_kwargs(mesh))
        print(config.explain())
    """

    use_megatron_fsdp: bool = True
    hugging_face: HfSettings | None = None

    def __new__(cls, *_: object, **settings: object) -> FsdpConfig:
        """Refuse unknown names, before the generated ``__init__`` raises a TypeError."""
        _check_names(settings)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for flag in FLAGS:
            value = _normal_value(flag, getattr(self, flag.dest))
            object.__setattr__(self, flag.dest, value)
            _check_value(flag, value)
        refusals = [rule.refusal(self) for rule in RULES if rule.is_broken(self)]
        if refusals:
            raise ConfigError("; ".join(refusals))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> FsdpConfig:
        """Return the config of parsed arguments, from ``add_megatron_fsdp_args`` or from Megatron-LM itself.

        Attributes that the namespace lacks get their defaults; attributes that are not flags of this engine are
        ignored.

        Raises:
            ConfigError: see the class; also if CUDA_DEVICE_MAX_CONNECTIONS is 1 in a job on GPUs.
        """
        given = vars(args)
        config = cls(**{flag.dest: given[flag.dest] for flag in FLAGS if flag.dest in given})
        if config.use_megatron_fsdp and torch.cuda.is_available() and given.get("distributed_backend") != "gloo":
            _check_connections()
        return config

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> FsdpConfig:
        """Return the config of Hugging Face's FSDP settings; docs/huggingface.md describes the effect of each key.

        Args:
            source: ``TrainingArguments.fsdp_config`` as a dict or JSON file, or accelerate's config as a dict or YAML
                file.
        Raises:
            ConfigError: a key is unknown (the error names the nearest one), a value is wrong, or keys contradict each
                other.
        """
        settings = read_hf_settings(source if isinstance(source, Mapping) else os.fspath(source))
        return cls(hugging_face=settings, **settings.flags())

    # ------------------------------------------------------------------ arguments of fully_shard

    def fully_shard_kwargs(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return keyword arguments for every ``fully_shard`` call of the model, except ``mesh``.

        Args:
            mesh: data-parallel mesh: one axis, or (outer, inner) for hybrid sharding.
        Returns:
            ``placements``, ``mp_policy`` and ``reshard_after_forward``; also ``offload_policy`` if flags ask for it.
        Raises:
            ConfigError: the mesh does not have the axes that the flags need; or it is a GPU mesh and
                CUDA_DEVICE_MAX_CONNECTIONS is 1.
        """
        if mesh.device_type == "cuda":
            _check_connections()
        self._check_mesh(mesh)
        return {
            "placements": self.placements(num_axes=mesh.ndim),
            "mp_policy": self.mixed_precision_policy(),
            "reshard_after_forward": None,
            **({"offload_policy": CPUOffloadPolicy()} if self.optimizer_cpu_offload else {}),
            **(self.hugging_face.fully_shard_kwargs(mesh.ndim) if self.hugging_face else {}),
        }

    def apply(self, model: nn.Module, *, num_microbatches: int | None = None) -> None:
        """Apply the flags that ``fully_shard`` does not take; call it once, after sharding all units.

        They are: how far gathers are prefetched (``--suggested-communication-unit-size``), permanent buffers
        (``--fsdp-double-buffer`` and related flags), one order of units on all ranks (``--fsdp-forward-order``, or
        ``forward_order`` in Hugging Face's settings), and that gradients are summed instead of averaged
        (``--calculate-per-token-loss``), so that the caller divides by the number of tokens.

        Args:
            num_microbatches: microbatches per step of all data-parallel ranks together. With
                ``--fsdp-invariant-reduction`` gradients are averaged over them, so the caller must not divide losses.
        Raises:
            ConfigError: ``--fsdp-invariant-reduction`` without ``num_microbatches`` or ``--calculate-per-token-loss``.
            StateError: no module of ``model`` is sharded.
            StorageError: permanent buffers are requested, but this PyTorch does not support them (before 2.13).
        """
        divisor, units = self._gradient_divisor(num_microbatches), list(units_below(model))
        if not units:
            raise StateError(
                f"{type(model).__name__} holds no sharded module. fix: call FsdpConfig.apply after fully_shard"
            )
        choices: dict[Unit, SlotChoice] = {}
        for unit in units:
            choice = SlotChoice.of_megatron(
                double_buffer=self.fsdp_double_buffer,
                max_pool=self.megatron_fsdp_max_pool_double_buffer,
                user_buffers=self.nccl_ub,
                is_symmetric=not self.disable_symmetric_registration,
                device_type=next((group.spec.device.type for group in unit.groups), "cpu"),
            )
            if choice.sizing is not None:
                choices[unit] = choice
        use_slots(choices)
        if self.suggested_communication_unit_size is not None:
            prefetch_elements(model, self.suggested_communication_unit_size)
        if self.fsdp_forward_order:
            share_forward_order(model)
        if divisor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(divisor)

    def _gradient_divisor(self, num_microbatches: int | None) -> float | None:
        """Return the divisor of reduced gradients; None: the number of ranks."""
        if self.calculate_per_token_loss:
            return 1.0
        if not self.fsdp_invariant_reduction:
            return None
        if num_microbatches is None:
            raise ConfigError(
                "--fsdp-invariant-reduction averages over the microbatches of a step on all ranks together. fix: give "
                "their number, FsdpConfig.apply(model, num_microbatches=...), or --calculate-per-token-loss"
            )
        return float(num_microbatches)

    def placements(self, *, num_axes: int) -> Placements:
        """Return the placements of weights, gradients and optimizer state on a mesh of one axis or (outer, inner)."""
        inner: Placements = getattr(Placements, self.data_parallel_sharding_strategy)(num_axes - 1)
        if num_axes == 1:
            return inner
        if self.is_sharded_over_outer_axis:
            return Placements.hfsdp(0, 1)
        return Placements(
            (0, 1),
            (Replicate(), *inner.parameter),
            (Partial("sum"), *inner.gradient),
            (Replicate(), *inner.optimizer),
        )

    def mixed_precision_policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes. As in Megatron-LM, gradients of bf16 weights are FP32 unless a flag says otherwise."""
        main_grads = self._main_grads_dtype()
        return MixedPrecisionPolicy(
            param_dtype=self._compute_dtype(),
            reduce_dtype=self._reduce_dtype() or main_grads,
            main_params_dtype=DTYPES.get(self.megatron_fsdp_main_params_dtype, self._compute_dtype()),
            main_grads_dtype=main_grads,
            accumulate_dtype=torch.float32 if self.ddp_reduce_scatter_with_fp32_accumulation else None,
            # As in Megatron's kernel: FP32 gradients of 16-bit weights are sums of products without 16-bit rounding.
            fuse_weight_gradients="wide" if self.gradient_accumulation_fusion else False,
            reduction="invariant" if self.fsdp_invariant_reduction else "default",
        )

    @property
    def is_zero3(self) -> bool:
        """True if weights are sharded between uses."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def is_sharded_over_outer_axis(self) -> bool:
        """True if optimizer state and main weights are sharded over both axes of a 2-D mesh."""
        return self.outer_dp_sharding_strategy == "optim" or self.enable_full_sharding_in_hsdp

    def _compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    def _main_grads_dtype(self) -> torch.dtype:
        # Megatron-LM's rule for "the model's gradient dtype": with --bf16 it sets FP32 gradients itself.
        automatic = torch.float16 if self.fp16 else torch.bfloat16 if self._reduces_in_bf16 else torch.float32
        return DTYPES.get(self.megatron_fsdp_main_grads_dtype, automatic)

    def _reduce_dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.megatron_fsdp_grad_comm_dtype, torch.bfloat16 if self._reduces_in_bf16 else None)

    @property
    def _reduces_in_bf16(self) -> bool:
        return self.bf16 and self.grad_reduce_in_bf16

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        instances = self.num_distributed_optimizer_instances
        if mesh.ndim not in (1, 2):
            raise ConfigError(
                f"the mesh has {mesh.ndim} axes. fix: pass its data-parallel part: one axis, mesh['dp'], or (outer, "
                "inner)"
            )
        if mesh.ndim == 1 and (instances > 1 or self.is_sharded_over_outer_axis):
            raise ConfigError(
                f"{self._outer_cause()} needs a mesh of two axes (outer, inner), found one of {mesh.size()} ranks. "
                "fix: init_device_mesh with two axes; the size of the outer one is "
                f"--num-distributed-optimizer-instances (found {instances})"
            )
        if mesh.ndim == 2 and instances > 1 and mesh.size(0) != instances:
            raise ConfigError(
                f"--num-distributed-optimizer-instances {instances} asks for an outer axis of {instances} ranks, found "
                f"a mesh of {mesh.size(0)} x {mesh.size(1)}. fix: --num-distributed-optimizer-instances {mesh.size(0)}"
            )

    def _outer_cause(self) -> str:
        if self.outer_dp_sharding_strategy == "optim":
            return _spell(self, "outer_dp_sharding_strategy")
        full = self.enable_full_sharding_in_hsdp
        return _spell(self, "enable_full_sharding_in_hsdp" if full else "num_distributed_optimizer_instances")

    # ------------------------------------------------------------------ messages for the user

    def explain(self) -> str:
        """Return one line per decision: the dtypes and each flag with an effect; "(default)" marks flags not given."""
        policy = self.mixed_precision_policy()
        wire = policy.main_grads_dtype if self._rests_partial else policy.reduce_dtype
        dtypes = {
            "weights compute in": policy.param_dtype,
            "main weights are": policy.main_params_dtype,
            "gradients accumulate in": policy.main_grads_dtype,
            "gradients are reduced in": wire,
        }
        lines = [f"{what} {DTYPE_NAMES[dtype] if dtype else 'their own dtype'}" for what, dtype in dtypes.items()]
        for flag in (flag for flag in FLAGS if not flag.is_silent and not self._why_without_effect(flag)):
            is_given = getattr(self, flag.dest) != flag.default
            if is_given or flag.dest in _ALWAYS_SAID:
                lines.append(f"{_spell(self, flag.dest)}: {flag.here}")
        return "\n".join((*lines, *(self.hugging_face.decisions() if self.hugging_face else ())))

    def notices(self) -> tuple[str, ...]:
        """Return one line, with the reason, for each flag that was given and does nothing here."""
        lines = []
        for flag in (flag for flag in FLAGS if getattr(self, flag.dest) != flag.default):
            given = flag.spell(getattr(self, flag.dest))
            if flag.is_silent:
                lines.append(flag.notice(given))
            elif reason := self._why_without_effect(flag):
                lines.append(f"{given} does nothing here; {reason}")
        return (*lines, *(self.hugging_face.notices if self.hugging_face else ()))

    def _why_without_effect(self, flag: Flag) -> str:
        """Return why a flag has no effect with the other flags given; empty if it has an effect."""
        if flag.dest == "grad_reduce_in_bf16" and not self.bf16:
            return "it belongs to --bf16; --megatron-fsdp-grad-comm-dtype bf16 reduces in bf16 without it"
        policy = self.mixed_precision_policy()
        is_wide = flag.dest == "ddp_reduce_scatter_with_fp32_accumulation"
        if is_wide and self.fsdp_invariant_reduction:
            return "--fsdp-invariant-reduction adds up in fp32 in any case"
        is_of_wire = flag.dest in ("grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype")
        if self._rests_partial and (is_wide or (is_of_wire and policy.reduce_dtype is not policy.main_grads_dtype)):
            strategy = _spell(self, "data_parallel_sharding_strategy")
            return f"with {strategy} gradients are reduced as they are, see --megatron-fsdp-main-grads-dtype"
        if is_wide and policy.reduce_dtype is torch.float32:
            return "gradients travel in fp32; see --megatron-fsdp-grad-comm-dtype"
        packed = policy.main_grads_dtype if self._rests_partial else policy.reduce_dtype
        is_fusion = flag.dest == "gradient_accumulation_fusion"
        if is_fusion and policy.param_dtype and packed and packed not in (policy.param_dtype, torch.float32):
            return f"gradients of {DTYPE_NAMES[policy.param_dtype]} weights are packed as {DTYPE_NAMES[packed]}"
        return ""

    @property
    def _rests_partial(self) -> bool:
        # Whole gradients accumulate over microbatches and are reduced once, in place, so in their own dtype.
        return self.data_parallel_sharding_strategy in ("no_shard", "optim") and not self.fsdp_invariant_reduction


def _spell(config: FsdpConfig, field: str) -> str:
    """Return the flag of a field with its value, and "(default)" if that is the default."""
    flag, value = flag_of(field), getattr(config, field)
    return flag.spell(value) + (" (default)" if value == flag.default else "")


def _check_names(settings: Mapping[str, object]) -> None:
    valid = [field.name for field in fields(FsdpConfig)]
    unknown = [str(name) for name in settings if name not in valid]
    if unknown:
        found = (
            f"unknown setting {name!r}. fix: the nearest valid one is {nearest(name, valid)!r}" for name in unknown
        )
        raise ConfigError("; ".join(found))


def _normal_value(flag: Flag, value: object) -> object:
    """Return a value in its command-line form: Megatron has torch dtypes and None for auto; JSON has lists."""
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if value is None and "auto" in flag.choices:
        return "auto"
    return tuple(value) if isinstance(value, list) else value


def _check_value(flag: Flag, value: object) -> None:
    """Raise if a value has the wrong type, is no legal choice, or is out of range; name the flag and legal values."""
    name = f"{flag.name} ({flag.dest})"
    if value is None and flag.default is None:
        return
    legal_types = (int, float) if flag.kind is float else (flag.kind,)
    if not isinstance(value, legal_types) or (isinstance(value, bool) and flag.kind is not bool):
        raise ConfigError(f"{name}: found {value!r}. fix: give a value of type {flag.kind.__name__}")
    if flag.choices and value not in flag.choices:
        choices = [str(choice) for choice in flag.choices]
        close = nearest(str(value), choices)
        raise ConfigError(
            f"{name}: found {value!r}, wanted one of {', '.join(choices)}. fix: {flag.name} {close} is the nearest"
        )
    if flag.kind is int and not flag.choices and isinstance(value, int) and value < 1:
        raise ConfigError(f"{name}: found {value}. fix: give a whole number >= 1")
    if flag.kind is float and isinstance(value, (int, float)) and not value >= 0:
        raise ConfigError(f"{name}: found {value}. fix: give a number >= 0")


def _check_connections() -> None:
    """Raise if the environment prevents all overlap on a GPU."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 contradicts --use-megatron-fsdp: with one queue to the GPU gathers and "
            "reductions wait for compute instead of overlapping with it. fix: unset the variable"
        )


# ---------------------------------------------------------------- prefetching by size instead of by units


def prefetch_elements(model: nn.Module, num_elements: int) -> None:
    """Make each unit prefetch the next units until these have ``num_elements`` elements together.

    This implements ``--suggested-communication-unit-size``: many small units are then in flight at once, like one large
    unit. At least one unit is prefetched, and the last one may exceed the number. Prefetched units take memory until
    they are used.

    The order is the order of registration, reversed in backward. It is the same on all ranks, whatever each of them
    computes. Later calls of ``set_modules_to_forward_prefetch`` or ``set_modules_to_backward_prefetch`` replace it.
    Elements are counted regardless of their dtype.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise StateError(f"{type(model).__name__} holds no sharded module. fix: call fully_shard on it first")
    forward = _with_parameters(model.modules())
    # A unit around others ends last in forward, so it is first in backward.
    backward = _with_parameters(_children_first(model, set()))[::-1]
    for position, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(_as_many(forward[position + 1 :], num_elements))
    for position, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(_as_many(backward[position + 1 :], num_elements))


def _with_parameters(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return one module of each unit that owns parameters, in the given order."""
    units: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule) and unit_of(module).groups:
            units.setdefault(id(unit_of(module)), module)
    return list(units.values())


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _as_many(units: Sequence[FSDPModule], num_elements: int) -> list[FSDPModule]:
    """Return the first units that together have ``num_elements`` elements, or all units."""
    sizes = [sum(p.numel() for group in unit_of(unit).groups for p in group.parameters.values()) for unit in units]
    before = itertools.accumulate(sizes, initial=0)
    return [unit for unit, total in zip(units, before, strict=False) if total < num_elements]
