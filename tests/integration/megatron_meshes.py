"""Meshes of Megatron's: train a GPTModel over tensor, pipeline, expert and context ranks, and compare with one process.

The one process runs plain PyTorch: the whole model without a wrapper, every data rank's microbatches one after the
other, ``torch.optim``'s Adam. Weights are drawn by their names in the whole model, and each rank takes its part as
Megatron's own constructors cut it, so that both sides begin alike.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.integrations.megatron import adapter as mcore_adapter
from tests.integration.megatron_training import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    OptimizerConfig,
    TransformerConfig,
    distributed,
    finalize_model_grads,
    get_forward_backward_func,
    get_gpt_layer_local_spec,
    get_megatron_optimizer,
    megatron_processes,
    optimizers,
    parallel_state,
    tensor_parallel,
    torch_norm,
)

LENGTH, VOCABULARY, NUM_EXPERTS, BATCH = 8, 32, 4, 2
MOE = {
    "num_moe_experts": NUM_EXPERTS,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
GATED = {"gated_linear_unit": True, "activation_func": nn.functional.silu, "add_bias_linear": False}
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """The model and the training, independent of the mesh.

    Attributes:
        model: fields of TransformerConfig. data: number of data ranks, whose microbatches differ.
        is_masked: ranks count different numbers of tokens. is_drawn: weights are not those of Megatron's constructors.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    data: int = 1
    is_tied: bool = False
    positions: str = "learned_absolute"
    layers: int = 2
    num_microbatches: int = 2
    steps: int = 2
    is_masked: bool = False
    is_drawn: bool = True
    optimizer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mesh:
    """How it is spread: sizes of Megatron's groups and the strategy of this engine (None: Megatron's own wrapper).

    ``is_installed``: Megatron's own names are called, which ``install`` has given to this engine.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    chunks: int | None = None
    instances: int = 1
    strategy: str | None = "optim_grads_params"
    is_installed: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)

    def groups(self) -> dict[str, Any]:
        """Return the arguments of ``initialize_model_parallel``."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "context_parallel_size": self.cp,
            "virtual_pipeline_model_parallel_size": self.chunks,
            "num_distributed_optimizer_instances": self.instances,
        }

    def config(self) -> dict[str, Any]:
        """Return the fields of TransformerConfig that say the same."""
        sizes = {name: size for name, size in self.groups().items() if name != "num_distributed_optimizer_instances"}
        if self.pp > 1:
            sizes["pipeline_dtype"] = torch.float32
        return {**sizes, **self.model}


@dataclass
class Outcome:
    """Figures by step (loss, norm of gradients, norm of weights), first gradients and last weights by whole names."""

    figures: list[tuple[float, float, float]]
    gradients: Weights
    weights: Weights


# ---------------------------------------------------------------- names and parts, by Megatron's own rules


def global_names(chunk: nn.Module) -> dict[str, Any]:
    """Return a chunk's parameters by the names that they have in the whole model."""
    numbers = {path: part.layer_number - 1 for path, part in chunk.named_modules() if re.search(r"layers\.\d+$", path)}
    found = {}
    for path, parameter in chunk.named_parameters():
        name = path
        for prefix, number in numbers.items():
            if path.startswith(f"{prefix}."):
                name = re.sub(r"layers\.\d+$", f"layers.{number}", prefix) + path[len(prefix) :]
        expert = re.search(r"local_experts\.(\d+)\.", name)
        if expert is not None:
            ranks = parallel_state.get_expert_model_parallel_world_size()
            first = parallel_state.get_expert_model_parallel_rank() * (NUM_EXPERTS // ranks)
            name = name.replace(expert.group(), f"local_experts.{int(expert.group(1)) + first}.")
        if getattr(parameter, "shared", False):
            name = "embedding.word_embeddings.weight"
        found[name.removeprefix("module.")] = parameter
    return found


def parts_of(parameter: nn.Parameter) -> tuple[int, int]:
    """Return which tensor-parallel rank this is for a weight, of how many."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 1
    kind = "expert_tensor" if getattr(parameter, "allreduce", True) is False else "tensor_model"
    rank, size = (getattr(parallel_state, f"get_{kind}_parallel_{what}")() for what in ("rank", "world_size"))
    return rank, size


def own_part(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a whole weight, as Megatron's initialisation cuts it."""
    rank, size = parts_of(parameter)
    if size == 1:
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride
    return torch.cat([piece.chunk(size, dim)[rank] for piece in whole.chunk(stride, dim)], dim)


def draw(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the first value of a weight, equal on all ranks and meshes."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator) * 0.3
    return drawn + 1.0 if "norm" in name and name.endswith("weight") else drawn


def whole_shape(parameter: Any) -> torch.Size:
    """Return the shape that a weight has in the whole model."""
    shape, (_, size) = list(parameter.shape), parts_of(parameter)
    if size > 1:
        shape[parameter.partition_dim] *= size
    return torch.Size(shape)


# ---------------------------------------------------------------- the model and its data


def config_of(task: Task, mesh: Mesh) -> TransformerConfig:
    fields = {
        "num_layers": task.layers,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **task.model,
        **mesh.config(),
    }
    return TransformerConfig(**fields)


def make_chunk(task: Task, config: TransformerConfig, stage: int | None) -> nn.Module:
    """Return this rank's chunk of the model, with drawn weights."""
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
    )
    if config.context_parallel_size > 1:
        spec.submodules.self_attention.submodules.core_attention = ContextAttention
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    # As in Megatron, layers without a device argument have no memory yet.
    device = torch.device("meta") if config.init_model_with_meta_device else contextlib.nullcontext()
    with mock.patch.object(torch_norm.WrappedTorchNorm, "__new__", _norm_of_a_sequence), device:
        chunk = GPTModel(
            config,
            spec,
            VOCABULARY,
            LENGTH,
            pre_process=first,
            post_process=last,
            position_embedding_type=task.positions,
            share_embeddings_and_output_weights=task.is_tied,
            vp_stage=stage,
        )
    with torch.no_grad():
        for name, parameter in global_names(chunk).items() if task.is_drawn else ():
            parameter.copy_(own_part(parameter, draw(name, whole_shape(parameter))))
    return Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk


def _norm_of_a_sequence(cls: Any, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    """Make what Megatron has of Apex or TransformerEngine: a norm whose gradients are summed over tensor ranks."""
    made: Any = nn.LayerNorm(hidden_size, eps=eps)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return made


class ContextAttention(nn.Module):
    """Causal attention of a part of a sequence to all of it: Megatron has it in TransformerEngine alone."""

    def __init__(self, *_: Any, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        self.group = parallel_state.get_context_parallel_group()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Attend; tensors are (length, batch, heads, size), in the order of the ranks."""
        length, batch, heads, size = query.shape
        key, value = (
            tensor_parallel.gather_from_sequence_parallel_region(part.contiguous(), group=self.group)
            for part in (key, value)
        )
        own = torch.arange(length)[:, None] + self.group.rank() * length
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / size**0.5
        scores = scores.masked_fill(torch.arange(key.shape[0])[None] > own, -10000.0).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", scores, value).reshape(length, batch, heads * size)


def microbatches(task: Task, data_rank: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, which of them count) of one data rank."""
    generator = torch.Generator().manual_seed(1000 * data_rank + step)
    for _ in range(task.num_microbatches):
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        counted = torch.rand(BATCH, LENGTH, generator=generator) > (0.2 + 0.1 * data_rank if task.is_masked else -1)
        yield tokens, counted.float()


def forward_step(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch, as pretrain_gpt.py's function of this name does."""
    tokens, counted = next(data)
    positions = torch.arange(LENGTH)[None].expand(BATCH, LENGTH)
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    tokens, counted, positions = (whole.chunk(size, 1)[rank] for whole in (tokens, counted, positions))
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    output = model(tokens, positions, mask, labels=(tokens + 1) % VOCABULARY)

    def loss_function(output: torch.Tensor) -> tuple[Any, ...]:
        total, number = (output.float() * counted).sum(), counted.sum()
        report = torch.stack([total.detach(), number])
        return total, number.int(), {"loss": report}

    return output, loss_function


# ---------------------------------------------------------------- one process


def reference(task: Task) -> Outcome:
    """Train in this process alone, with plain PyTorch."""
    with megatron_processes():
        config = config_of(task, Mesh())
        model = make_chunk(task, config, None)
        names = global_names(model)
        options = OptimizerConfig(lr=1e-2, **{"adam_eps": 1e-4, **task.optimizer})
        adam = torch.optim.AdamW(
            list(names.values()),
            lr=options.lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
        )
        figures = []
        gradients: Weights = {}
        for step in range(task.steps):
            adam.zero_grad()
            loss = _accumulate(task, config, model, step)
            if not gradients:
                gradients = {name: parameter.grad.clone() for name, parameter in names.items()}
            norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad).item()
            adam.step()
            weight = torch.stack([parameter.detach().square().sum() for parameter in names.values()]).sum().sqrt()
            figures.append((loss, norm, weight.item()))
        return Outcome(figures, gradients, {name: parameter.detach().clone() for name, parameter in names.items()})


def _accumulate(task: Task, config: TransformerConfig, model: nn.Module, step: int) -> float:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    runs = task.data * task.num_microbatches
    is_per_token = bool(config.calculate_per_token_loss)
    totals, numbers = 0.0, 0.0
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) if is_per_token else torch.ones(1) / runs)
    for data_rank in range(task.data):
        batches = microbatches(task, data_rank, step)
        for _ in range(task.num_microbatches):
            output, loss_function = forward_step(batches, model)
            total, number, _ = loss_function(output)
            (total if is_per_token else total / number / runs).backward()
            totals += total.item() if is_per_token else (total / number).item() / runs
            numbers += number.item()
    if is_per_token:
        for parameter in model.parameters():
            parameter.grad.div_(numbers)
    return totals / numbers if is_per_token else totals


# ---------------------------------------------------------------- many


def build(task: Task, mesh: Mesh) -> tuple[list[Any], Any]:
    """Return this rank's wrapped chunks and their optimizer."""
    config = config_of(task, mesh)
    stages = [None] if mesh.chunks is None else list(range(mesh.chunks))
    made = [make_chunk(task, config, stage) for stage in stages]
    ddp = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": True,
        "num_distributed_optimizer_instances": mesh.instances,
        **mesh.ddp,
    }
    options = {"lr": 1e-2, "adam_eps": 1e-4, "bf16": config.bf16, "params_dtype": config.params_dtype, **task.optimizer}
    optimizer_config = OptimizerConfig(**options)
    if mesh.strategy is None:
        chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), chunk) for chunk in made]
        make = optimizers.get_megatron_optimizer if mesh.is_installed else get_megatron_optimizer
        return chunks, make(optimizer_config, chunks, use_gloo_process_groups=False)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=mesh.strategy, **ddp)
    if mesh.is_installed:
        wrap, get_optimizer = distributed.FullyShardedDataParallel, optimizers.get_megatron_optimizer
    else:
        wrap, get_optimizer = mcore_adapter.ShardedDataParallel, mcore_adapter.get_megatron_optimizer
    chunks = [wrap(config, ddp_config, chunk) for chunk in made]
    config.param_sync_func = [chunk.start_param_sync for chunk in chunks] if mesh.chunks else chunks[0].start_param_sync
    return chunks, get_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)


def run_steps(task: Task, chunks: list[Any], optimizer: Any, steps: range) -> tuple[list[tuple[float, float]], Weights]:
    """Train under Megatron's schedule; return (loss, norm) of each step, and this rank's first gradients."""
    config = chunks[0].config
    gradients: Weights = {}

    def finalize(model: Any, num_tokens: Any = None, **options: Any) -> None:
        finalize_model_grads(model, num_tokens, **options)
        if not gradients:
            for chunk in chunks:
                for name, parameter in global_names(chunk.module).items():
                    gradients[name] = whole_rows(parameter.main_grad if parameter.grad is None else parameter.grad)

    config.finalize_model_grads_func = finalize
    figures = []
    for step in steps:
        losses = forward_and_backward(task, chunks, optimizer, step)
        is_done, norm, _ = optimizer.step()
        assert is_done
        figures.append((_mean_loss(losses, is_per_token=config.calculate_per_token_loss), norm))
    return figures, gradients


def forward_and_backward(task: Task, chunks: list[Any], optimizer: Any, step: int) -> list[dict[str, torch.Tensor]]:
    """Run this rank's microbatches of a step, and return the last stage's report about each."""
    is_many, config = len(chunks) > 1, chunks[0].config
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if is_many else chunks[0].no_sync
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches: Any = [microbatches(task, parallel_state.get_data_parallel_rank(), step) for _ in chunks]
    reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if is_many else batches[0],
        model=chunks if is_many else chunks[0],
        num_microbatches=task.num_microbatches,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return reports


def _mean_loss(losses: list[dict[str, torch.Tensor]], *, is_per_token: bool) -> float:
    reports = torch.stack([entry["loss"] for entry in losses]) if losses else torch.zeros(0, 2)
    # Those of other pipeline stages have none.
    found = torch.stack([reports[:, 0].sum(), reports[:, 1].sum(), (reports[:, 0] / reports[:, 1]).sum()])
    count = torch.tensor([float(len(losses))])
    for tensor in (found, count):
        dist.all_reduce(tensor)
    return (found[0] / found[1] if is_per_token else found[2] / count[0]).item()


def whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part along model-parallel ranks, whole along data-parallel ones."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().float().clone()


@dataclass(frozen=True)
class Case:
    """A mesh, and the task it runs."""

    task: Task
    mesh: Mesh


def differences(case: Case, wanted: Outcome) -> list[str]:
    """Train on this rank's part of a mesh; return a line for everything that is not as in one process."""
    task, mesh = case.task, case.mesh
    with megatron_processes(**mesh.groups()):
        assert parallel_state.get_data_parallel_world_size() == task.data
        chunks, optimizer = build(task, mesh)
        figures, gradients = run_steps(task, chunks, optimizer, range(task.steps))
        found = []
        for (loss, norm), (wanted_loss, wanted_norm, _) in zip(figures, wanted.figures, strict=True):
            found += _apart("loss", loss, wanted_loss) + _apart("norm", norm, wanted_norm)
        names = {name: part for chunk in chunks for name, part in global_names(chunk.module).items()}
        assert names.keys() == gradients.keys()
        for name, parameter in names.items():
            found += _unlike(f"gradient of {name}", gradients[name], own_part(parameter, wanted.gradients[name]))
            found += _unlike(f"weight {name}", whole_rows(parameter), own_part(parameter, wanted.weights[name]))
        if mesh.strategy is not None:
            found += _apart("norm of weights", optimizer.get_weight_norm(), wanted.figures[-1][2])
        return found


def _apart(what: str, found: float, wanted: float) -> list[str]:
    return [] if abs(found - wanted) <= 1e-5 * abs(wanted) else [f"{what}: {found} for {wanted}"]


def _unlike(what: str, found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    if found.shape != wanted.shape:
        return [f"{what}: shape {tuple(found.shape)} for {tuple(wanted.shape)}"]
    scale = wanted.abs().max().item()
    error = (found - wanted).abs().max().item()
    if error <= 1e-5 * scale + 1e-7:
        return []
    factor = ((found * wanted).sum() / wanted.square().sum()).item()
    return [f"{what}: off by {error:.2e} of {scale:.2e}, factor {factor:.4f}"]


def run_cases(cases: Mapping[str, tuple[Case, Outcome]]) -> dict[str, list[str]]:
    """Run many meshes in one job; a mesh that raises ends it."""
    return {name: differences(case, wanted) for name, (case, wanted) in cases.items()}


def references(tasks: list[Task]) -> list[Outcome]:
    return [reference(task) for task in tasks]
