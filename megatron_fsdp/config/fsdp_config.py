"""FsdpConfig: the flags as one checked value, and what they mean for ``fully_shard``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import Partial, Replicate
from megatron_fsdp.config.apply import prefetch_elements
from megatron_fsdp.config.flags import FlagValues
from megatron_fsdp.config.hf_settings import HfSettings, read_hf_settings
from megatron_fsdp.config.parser import FLAGS, RULES, Flag, flag_of
from megatron_fsdp.errors import ConfigError, nearest
from megatron_fsdp.policy.offload import CPUOffloadPolicy
from megatron_fsdp.policy.precision import MixedPrecisionPolicy
from megatron_fsdp.policy.slots import SlotChoice
from megatron_fsdp.policy.strategy import Placements
from megatron_fsdp.runtime.lifecycle.module import FSDPModule
from megatron_fsdp.runtime.step.unit import units_below
from megatron_fsdp.runtime.weights.memory_slots import use_slots

__all__ = ["CHOICES", "SHARDED", "FsdpConfig"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Megatron stores FP8 optimizer state as bytes.
DTYPE_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, torch.uint8: "fp8"}


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
            **(self.hugging_face.fully_shard_kwargs() if self.hugging_face else {}),
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
            reduction="invariant" if self.fsdp_invariant_reduction else None,
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
        """Return one line per decision, with the flag that caused it; "(default)" where no flag was given."""
        return "\n".join(self._decisions())

    def _decisions(self) -> Iterator[str]:
        if self.use_megatron_fsdp:
            yield "this engine shards the model: --use-megatron-fsdp"
        else:
            yield "a script that follows Megatron does not shard the model: no --use-megatron-fsdp"
        strategy = self.data_parallel_sharding_strategy
        yield f"{SHARDED[strategy]}: {_spell(self, 'data_parallel_sharding_strategy')}"
        yield self._outer_decision()
        yield from self._dtype_decisions()
        if self.use_megatron_fsdp and self.ckpt_format == "torch_dist":
            yield "checkpoints are fsdp_dtensor: --use-megatron-fsdp (--ckpt-format torch_dist counts as not given)"
        else:
            yield f"checkpoints are {self.ckpt_format}: {_spell(self, 'ckpt_format')}"
        yield "gathers and reductions overlap with compute: always"
        yield from self._choices()
        yield from self.hugging_face.decisions() if self.hugging_face else ()

    def _choices(self) -> Iterator[str]:
        """Yield what flags decide that are seldom given, where they are."""
        for field, decision in CHOICES.items():
            flag, value = flag_of(field), getattr(self, field)
            if value != flag.default and not self._why_without_effect(flag):
                yield f"{decision.format(value)}: {flag.spell(value)}"

    def _outer_decision(self) -> str:
        if self.is_sharded_over_outer_axis:
            return f"over the outer axis optimizer state and main weights are sharded too: {self._outer_cause()}"
        instances = _spell(self, "num_distributed_optimizer_instances")
        if self.num_distributed_optimizer_instances > 1:
            cause = f"{instances}, {_spell(self, 'outer_dp_sharding_strategy')}"
            return f"{self.num_distributed_optimizer_instances} outer replicas: {cause}"
        return f"one axis, no outer replicas: {instances}"

    def _dtype_decisions(self) -> Iterator[str]:
        policy = self.mixed_precision_policy()
        model = ["--bf16"] if self.bf16 else ["--fp16"] if self.fp16 else ["neither --bf16 nor --fp16"]
        less = ["--grad-reduce-in-bf16"] if self._reduces_in_bf16 else []
        main_grads = _spell(self, "megatron_fsdp_main_grads_dtype")
        yield _dtype_decision("weights compute in", policy.param_dtype, model)
        causes = self._dtype_causes("megatron_fsdp_main_params_dtype", model)
        yield _dtype_decision("main weights are", policy.main_params_dtype, causes)
        causes = self._dtype_causes("megatron_fsdp_main_grads_dtype", model + less)
        yield _dtype_decision("gradients accumulate in", policy.main_grads_dtype, causes)
        if self._rests_partial:
            causes = [_spell(self, "data_parallel_sharding_strategy"), main_grads]
            yield _dtype_decision("gradients are reduced as they are, in", policy.main_grads_dtype, causes)
        else:
            causes = self._dtype_causes("megatron_fsdp_grad_comm_dtype", less or [main_grads])
            yield _dtype_decision("gradients are reduced in", policy.reduce_dtype, causes)
        if self.ddp_reduce_scatter_with_fp32_accumulation:
            why = self._why_without_effect(flag_of("ddp_reduce_scatter_with_fp32_accumulation"))
            what = f"as without it, since {why}" if why else "in fp32 by each rank for itself"
            yield f"ranks' gradients are added up {what}: {_spell(self, 'ddp_reduce_scatter_with_fp32_accumulation')}"

    def _dtype_causes(self, field: str, when_auto: list[str]) -> list[str]:
        return [_spell(self, field), *(when_auto if getattr(self, field) == "auto" else [])]

    def notices(self) -> tuple[str, ...]:
        """Return one line, with the reason, for every flag that was given and does nothing here."""
        lines = []
        for flag in (flag for flag in FLAGS if getattr(self, flag.dest) != flag.default):
            given = flag.spell(getattr(self, flag.dest))
            if flag.is_silent:
                lines.append(flag.notice(given))
            elif reason := self._why_without_effect(flag):
                lines.append(f"{given} does nothing here; {reason}")
        return (*lines, *(self.hugging_face.notices() if self.hugging_face else ()))

    def _why_without_effect(self, flag: Flag) -> str:
        """Return why a flag that is acted on does nothing beside the others, or nothing where it does something."""
        if flag.dest == "grad_reduce_in_bf16" and not self.bf16:
            return "it belongs to --bf16; --megatron-fsdp-grad-comm-dtype bf16 reduces in bf16 without it"
        policy = self.mixed_precision_policy()
        if flag.dest == "ddp_reduce_scatter_with_fp32_accumulation":
            return self._why_no_wide_sums(policy.reduce_dtype)
        is_of_wire = flag.dest in ("grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype")
        if is_of_wire and self._rests_partial and policy.reduce_dtype is not policy.main_grads_dtype:
            strategy = _spell(self, "data_parallel_sharding_strategy")
            return f"with {strategy} gradients are reduced as they are, see --megatron-fsdp-main-grads-dtype"
        packed = self._main_grads_dtype() if self._rests_partial else self._reduce_dtype() or self._main_grads_dtype()
        if (
            flag.dest == "gradient_accumulation_fusion"
            and policy.param_dtype
            and packed not in (policy.param_dtype, torch.float32)
        ):
            return f"gradients of {DTYPE_NAMES[policy.param_dtype]} weights are packed as {DTYPE_NAMES[packed]}"
        return ""

    def _why_no_wide_sums(self, reduce_dtype: torch.dtype | None) -> str:
        if self.fsdp_invariant_reduction:
            return "--fsdp-invariant-reduction adds up in fp32 in any case"
        if self._rests_partial:
            strategy = _spell(self, "data_parallel_sharding_strategy")
            return f"with {strategy} gradients are reduced as they are, see --megatron-fsdp-main-grads-dtype"
        is_wide = reduce_dtype is not None and reduce_dtype.itemsize >= torch.float32.itemsize
        return "gradients travel in fp32; see --megatron-fsdp-grad-comm-dtype" if is_wide else ""

    @property
    def _rests_partial(self) -> bool:
        # Whole gradients accumulate over microbatches and are reduced once, in place, so in their own dtype.
        return self.data_parallel_sharding_strategy in ("no_shard", "optim") and not self.fsdp_invariant_reduction


def _dtype_decision(what: str, dtype: torch.dtype | None, causes: list[str]) -> str:
    return f"{what} {DTYPE_NAMES[dtype] if dtype else 'their own dtype'}: {', '.join(causes)}"


def _spell(config: FsdpConfig, field: str) -> str:
    """Return the flag of a field with its value, as given or as the default."""
    flag, value = flag_of(field), getattr(config, field)
    return flag.spell(value) + (" (default)" if value == flag.default else "")


def _check_names(settings: Mapping[str, object]) -> None:
    valid = [field.name for field in fields(FsdpConfig)]
    unknown = [str(name) for name in settings if name not in valid]
    if unknown:
        raise ConfigError(
            "; ".join(
                f"unknown setting {name!r}, the nearest valid one is {nearest(name, valid)!r}" for name in unknown
            )
        )


def _normal_value(flag: Flag, value: object) -> object:
    """Return a value as the command line has it: Megatron makes dtypes torch's, and auto None; JSON has lists."""
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if value is None and "auto" in flag.choices:
        return "auto"
    return tuple(value) if isinstance(value, list) else value


def _check_value(flag: Flag, value: object) -> None:
    """Refuse a value of another type, none of the choices, or out of range.

    Raises:
        ConfigError: it is; names the flag and what is legal.
    """
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


SHARDED = {
    "no_shard": "nothing is sharded, gradients are all-reduced",
    "optim": "optimizer state and main weights are sharded (ZeRO-1)",
    "optim_grads": "optimizer state, main weights and gradients are sharded (ZeRO-2)",
    "optim_grads_params": "optimizer state, gradients and weights are sharded (ZeRO-3)",
}

# Of flags that a default leaves nothing to be said about; the words for another value.
CHOICES = {
    "init_model_with_meta_device": "the model is built without memory, sharded, then initialised",
    "suggested_communication_unit_size": "gathers run ahead by units of {} elements or more",
    "fsdp_double_buffer": "units of equal size take turns in buffers that stay",
    "megatron_fsdp_max_pool_double_buffer": "units take turns in buffers that stay, as large as the largest one",
    "nccl_ub": "buffers that stay are registered with NCCL, on GPUs",
    "disable_symmetric_registration": "registered buffers are not symmetric memory",
    "fsdp_invariant_reduction": "gradients have the same bits on any number of ranks",
    "gradient_accumulation_fusion": "weight gradients are added after the GEMM, not in it",
    "calculate_per_token_loss": "gradients are summed over ranks and divided by the tokens of the step",
    "optimizer": "{} steps the main weights",
    "optimizer_cpu_offload": "weights at rest, gradients and the optimizer step are on the CPU",
    "clip_grad": "the global norm of gradients is at most {} (0: measured only)",
    "check_for_nan_in_loss_and_grad": "NaN in losses and gradients ends nothing",
    "check_for_large_grads": "gradient norms far above those before are said",
    "async_save": "checkpoints are written while training goes on",
    "strict_fsdp_dtensor_load": "what a checkpoint has of another model is left out",
    "dump_param_to_param_group_map": "the optimizer's groups are written to {}",
    "fake_process_group": "one process stands for all ranks and communicates with none; losses mean nothing",
}
