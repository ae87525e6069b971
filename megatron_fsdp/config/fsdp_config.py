"""FsdpConfig: the flags as one checked value, and what they mean for ``fully_shard``."""

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
from megatron_fsdp.engine.unit import units_below
from megatron_fsdp.errors import ConfigError, StateError, nearest
from megatron_fsdp.lifecycle.module import FSDPModule, unit_of
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.variants.memory_slots import use_slots

__all__ = ["FsdpConfig", "prefetch_elements"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Megatron stores FP8 optimizer state as bytes.
DTYPE_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.uint8: "fp8"}
_ALWAYS_SAID = ("data_parallel_sharding_strategy", "num_distributed_optimizer_instances")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig(FlagValues):
    """Megatron-LM's flags around FSDP, checked; docs/flags.md says what each means and does here.

    The fields carry the names of the flags' attributes, and Megatron's defaults; only ``use_megatron_fsdp`` is True,
    since a config without it would be of no use. Dtypes may also be given as ``torch.dtype``, as Megatron's own parser
    leaves them.

    Raises:
        ConfigError: an unknown field (the nearest one is named), a value of the wrong type or not among the choices, or
            fields that contradict each other (both flags are named).

    Example:
        config = FsdpConfig(data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_bf16=True, bf16=True)
        fully_shard(model, mesh, **config.fully_shard_kwargs(mesh))
        print(config.explain())
    """

    use_megatron_fsdp: bool = True
    hugging_face: HfSettings | None = None

    def __new__(cls, *_: object, **settings: object) -> FsdpConfig:
        """Refuse unknown names before the generated ``__init__`` would, with a TypeError."""
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
        """Return the config that parsed arguments ask for, of ``add_megatron_fsdp_args`` or of Megatron-LM itself.

        Attributes that the namespace lacks take their defaults; those that are no flags of this engine are left alone.

        Raises:
            ConfigError: see the class; also CUDA_DEVICE_MAX_CONNECTIONS=1 in a job on GPUs.
        """
        given = vars(args)
        config = cls(**{flag.dest: given[flag.dest] for flag in FLAGS if flag.dest in given})
        if config.use_megatron_fsdp and torch.cuda.is_available() and given.get("distributed_backend") != "gloo":
            _check_connections()
        return config

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> FsdpConfig:
        """Return the config of Hugging Face's FSDP settings; docs/huggingface.md says what each key does here.

        Args:
            source: ``TrainingArguments.fsdp_config`` as a dict or JSON file, or the dict or YAML file of accelerate.
        Raises:
            ConfigError: an unknown key (the nearest one is named), a wrong value, or keys that contradict each other.
        """
        settings = read_hf_settings(source if isinstance(source, Mapping) else os.fspath(source))
        return cls(hugging_face=settings, **settings.flags())

    # ------------------------------------------------------------------ what fully_shard needs

    def fully_shard_kwargs(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return keyword arguments for every ``fully_shard`` call of the model, ``mesh`` itself aside.

        Args:
            mesh: data-parallel mesh: one axis, or (outer, inner) for hybrid sharding.
        Returns:
            ``placements``, ``mp_policy`` and ``reshard_after_forward``; ``offload_policy`` to offload.
        Raises:
            ConfigError: the mesh does not have the axes that the flags ask for, or is of GPUs and
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
        """Set what the flags ask of a model beyond ``fully_shard``; call it once, when all units are made.

        How far gathers run ahead (``--suggested-communication-unit-size``), whether buffers stay
        (``--fsdp-double-buffer`` and its like), and that gradients are summed instead of averaged
        (``--calculate-per-token-loss``), for the caller to divide by the number of tokens.

        Args:
            num_microbatches: of a step on all data-parallel ranks together, whose gradients are averaged with
                ``--fsdp-invariant-reduction``; the caller does not divide their losses.
        Raises:
            ConfigError: ``--fsdp-invariant-reduction`` without ``num_microbatches`` or ``--calculate-per-token-loss``.
            StateError: no module of ``model`` is sharded.
            StorageError: buffers that stay, and a PyTorch that has none (before 2.13).
        """
        for unit in units_below(model):
            choice = SlotChoice.of_megatron(
                double_buffer=self.fsdp_double_buffer,
                max_pool=self.megatron_fsdp_max_pool_double_buffer,
                user_buffers=self.nccl_ub,
                is_symmetric=not self.disable_symmetric_registration,
                device_type=next((group.spec.device.type for group in unit.groups), "cpu"),
            )
            if choice.sizing is not None:
                use_slots(unit, choice)
        if self.suggested_communication_unit_size is not None:
            prefetch_elements(model, self.suggested_communication_unit_size)
        divisor = self._gradient_divisor(num_microbatches)
        if divisor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(divisor)

    def _gradient_divisor(self, num_microbatches: int | None) -> float | None:
        """Return what reduced gradients are divided by, None for the number of ranks."""
        if self.calculate_per_token_loss:
            return 1.0
        if not self.fsdp_invariant_reduction:
            return None
        if num_microbatches is None:
            raise ConfigError(
                "--fsdp-invariant-reduction averages over the microbatches of a step on all ranks together: give their "
                "number, FsdpConfig.apply(model, num_microbatches=...), or --calculate-per-token-loss"
            )
        return float(num_microbatches)

    def placements(self, *, num_axes: int) -> Placements:
        """Return where weights, gradients and optimizer state rest, on a mesh of one axis or of two (outer, inner)."""
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
        """Return the dtypes. As in Megatron-LM, gradients of bf16 weights are FP32 unless a flag asks for less."""
        main_grads = self._main_grads_dtype()
        return MixedPrecisionPolicy(
            param_dtype=self._compute_dtype(),
            reduce_dtype=self._reduce_dtype() or main_grads,
            main_params_dtype=DTYPES.get(self.megatron_fsdp_main_params_dtype, self._compute_dtype()),
            main_grads_dtype=main_grads,
            accumulate_dtype=torch.float32 if self.ddp_reduce_scatter_with_fp32_accumulation else None,
            # As Megatron's kernel does: FP32 gradients of 16-bit weights are sums of products that were never rounded.
            fuse_weight_gradients="wide" if self.gradient_accumulation_fusion else False,
            reduction="invariant" if self.fsdp_invariant_reduction else "default",
        )

    @property
    def is_zero3(self) -> bool:
        """Whether weights are sharded between uses."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def is_sharded_over_outer_axis(self) -> bool:
        """Whether optimizer state and main weights are sharded over both axes of a 2-D mesh."""
        return self.outer_dp_sharding_strategy == "optim" or self.enable_full_sharding_in_hsdp

    def _compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    def _main_grads_dtype(self) -> torch.dtype:
        # Megatron-LM's own rule for "the model's gradient dtype": with --bf16 it switches to FP32 gradients by itself.
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
                f"the mesh has {mesh.ndim} axes; pass its data-parallel part: one axis, mesh['dp'], or (outer, inner)"
            )
        if mesh.ndim == 1 and (instances > 1 or self.is_sharded_over_outer_axis):
            raise ConfigError(
                f"{self._outer_cause()} needs a mesh of two axes (outer, inner), found one of {mesh.size()} ranks; "
                f"--num-distributed-optimizer-instances (found {instances}) is the size of the outer axis"
            )
        if mesh.ndim == 2 and instances > 1 and mesh.size(0) != instances:
            raise ConfigError(
                f"--num-distributed-optimizer-instances {instances} asks for an outer axis of {instances} ranks, found "
                f"a mesh of {mesh.size(0)} x {mesh.size(1)}"
            )

    def _outer_cause(self) -> str:
        if self.outer_dp_sharding_strategy == "optim":
            return _spell(self, "outer_dp_sharding_strategy")
        full = self.enable_full_sharding_in_hsdp
        return _spell(self, "enable_full_sharding_in_hsdp" if full else "num_distributed_optimizer_instances")

    # ------------------------------------------------------------------ what to tell the user

    def explain(self) -> str:
        """Return a line for every decision: the dtypes, each flag that acts, and "(default)" where it was not given."""
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
        """Return one line, with the reason, for every flag that was given and does nothing here."""
        lines = []
        for flag in (flag for flag in FLAGS if getattr(self, flag.dest) != flag.default):
            given = flag.spell(getattr(self, flag.dest))
            if flag.is_silent:
                lines.append(flag.notice(given))
            elif reason := self._why_without_effect(flag):
                lines.append(f"{given} does nothing here; {reason}")
        return (*lines, *(self.hugging_face.notices if self.hugging_face else ()))

    def _why_without_effect(self, flag: Flag) -> str:
        """Return why a flag that is acted on does nothing beside the others, or nothing where it does something."""
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
    """Return the flag of a field with its value, as given or as the default."""
    flag, value = flag_of(field), getattr(config, field)
    return flag.spell(value) + (" (default)" if value == flag.default else "")


def _check_names(settings: Mapping[str, object]) -> None:
    valid = [field.name for field in fields(FsdpConfig)]
    unknown = [str(name) for name in settings if name not in valid]
    if unknown:
        found = (f"unknown setting {name!r}, the nearest valid one is {nearest(name, valid)!r}" for name in unknown)
        raise ConfigError("; ".join(found))


def _normal_value(flag: Flag, value: object) -> object:
    """Return a value as the command line has it: Megatron makes dtypes torch's, and auto None; JSON has lists."""
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if value is None and "auto" in flag.choices:
        return "auto"
    return tuple(value) if isinstance(value, list) else value


def _check_value(flag: Flag, value: object) -> None:
    """Refuse a value of another type, none of the choices, or out of range; name the flag and what is legal."""
    name = f"{flag.name} ({flag.dest})"
    if value is None and flag.default is None:
        return
    legal_types = (int, float) if flag.kind is float else (flag.kind,)
    if not isinstance(value, legal_types) or (isinstance(value, bool) and flag.kind is not bool):
        raise ConfigError(f"{name}: found {value!r}, wanted {flag.kind.__name__}")
    if flag.choices and value not in flag.choices:
        choices = [str(choice) for choice in flag.choices]
        close = nearest(str(value), choices)
        raise ConfigError(f"{name}: found {value!r}, wanted one of {', '.join(choices)}; the nearest is {close}")
    if flag.kind is int and not flag.choices and isinstance(value, int) and value < 1:
        raise ConfigError(f"{name}: found {value}, wanted a whole number >= 1")
    if flag.kind is float and isinstance(value, (int, float)) and not value >= 0:
        raise ConfigError(f"{name}: found {value}, wanted a number >= 0")


def _check_connections() -> None:
    """Refuse an environment in which nothing would overlap on a GPU."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 contradicts --use-megatron-fsdp: with one queue to the GPU gathers and "
            "reductions wait for compute instead of overlapping with it; unset the variable"
        )


# ---------------------------------------------------------------- gathers ahead, by size instead of by units


def prefetch_elements(model: nn.Module, num_elements: int) -> None:
    """Let each unit start the gathers of as many units ahead as hold ``num_elements`` elements together.

    What ``--suggested-communication-unit-size`` asks for: many small units are then in flight at a time, as one large
    one would be. The last unit started may exceed the number, and there is always one. They take memory for as long
    as they wait for their turn.

    The order is that of registration, backwards in backward, alike on all ranks whatever each of them computes.
    Calling ``set_modules_to_forward_prefetch`` or ``set_modules_to_backward_prefetch`` afterwards replaces it.
    Elements are those of parameters, whatever their dtype.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise StateError(f"{type(model).__name__} holds no sharded module; call fully_shard on it first")
    forward = _with_parameters(model.modules())
    # A unit around others is the last to end in forward, and so the first in backward.
    backward = _with_parameters(_children_first(model, set()))[::-1]
    for position, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch(_as_many(forward[position + 1 :], num_elements))
    for position, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch(_as_many(backward[position + 1 :], num_elements))


def _with_parameters(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return one module of each unit that owns parameters, in the order given."""
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
    """Return the first units that together hold so many elements, or all of them."""
    sizes = [sum(p.numel() for group in unit_of(unit).groups for p in group.parameters.values()) for unit in units]
    before = itertools.accumulate(sizes, initial=0)
    return [unit for unit, total in zip(units, before, strict=False) if total < num_elements]
