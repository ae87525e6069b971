"""Scenarios: the methods of ``FSDPModule``, and the functions beside ``fully_shard``, one each."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.functional.compatibility import (
    SINCE_2_15,
    Outcome,
    blocks,
    layers,
    outcome,
    raises,
    scenario,
    shard,
    shows_dtensors,
    train,
)
from tests.harness.models import inputs
from tests.harness.oracle import whole

__all__: list[str] = []


def hsdp(fsdp: Any, **options: Any) -> Any:
    """Shard the blocks over two ranks, in two replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(fsdp, mesh=mesh, **options)


def gradients(model: nn.Module) -> list[float]:
    """Return the norm of each whole gradient, -1 where there is none."""
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad
        found.append(-1.0 if gradient is None else round(float(whole(gradient, parameter).norm()), 5))
    return found


# ---------------------------------------------------------------- unshard, reshard


@scenario("unshard, reshard")
def unshard_and_reshard(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = layers(model)[0]
    seen = [layer.unshard() is None, shows_dtensors(layer), layer.up.weight.shape, shows_dtensors(layers(model)[1])]
    weight = layer.up.weight.detach().clone()
    layer.reshard()
    seen += [shows_dtensors(layer), torch.equal(weight, whole(layer.up.weight, weight))]
    layer.unshard()
    return outcome(model, train(model, optimizer=optimizer), seen)


@scenario("unshard(async_op=True), UnshardHandle.wait")
def unshard_ahead(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    seen = []

    def gather_all(model: nn.Module, is_last: bool) -> None:
        handles = [layer.unshard(async_op=True) for layer in layers(model)]
        handles[0].wait()
        handles[0].wait()
        seen.append((isinstance(handles[0], fsdp.UnshardHandle), shows_dtensors(layers(model)[0])))

    return outcome(model, train(model, before=gather_all), seen)


@scenario("unshard under MixedPrecisionPolicy")
def unshard_in_bf16(fsdp: Any) -> Outcome:
    layer = fsdp.fully_shard(nn.Linear(3, 5), mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16))
    layer.unshard()
    seen = layer.weight.dtype
    layer.reshard()
    return Outcome((), {}, (seen, layer.weight.dtype))


@scenario("reset_iter_state", needs="FSDPModule.reset_iter_state")
def recover(fsdp: Any) -> Outcome:
    """A forward that raised leaves nothing behind, nor does a backward."""
    model = shard(fsdp)
    handle = layers(model)[1].up.register_forward_hook(fail)
    seen = [raises(lambda: model(inputs(0, 0)), RuntimeError)]
    handle.remove()
    model.reset_iter_state()
    handle = layers(model)[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    loss = model(inputs(0, 0)).square().mean()
    handle.remove()
    seen.append(raises(loss.backward, RuntimeError))
    model.reset_iter_state()
    model.zero_grad()
    return outcome(model, train(model), seen)


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")


# ---------------------------------------------------------------- accumulation


Switch = Callable[[Any, bool], object]


def switched(
    name: str, switch: Switch | None, microbatches: int = 2, make: Callable[[Any], Any] = shard, **options: Any
) -> None:
    """Enter a scenario of a model that is told before each microbatch whether it is the last one of a step."""

    @scenario(name, **options)
    def body(fsdp: Any) -> Outcome:
        model = make(fsdp)
        return outcome(model, train(model, microbatches=microbatches, before=switch))


def sync_in_one_unit(model: Any, is_last: bool) -> None:
    layers(model)[1].set_requires_gradient_sync(is_last, recurse=False)
    model.set_requires_gradient_sync(is_last, recurse=False)


def sync(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


HSDP: dict[str, Any] = {"make": hsdp, "num_ranks": 4}
switched("set_requires_gradient_sync", sync, 3)
switched("set_requires_gradient_sync(recurse=False)", sync_in_one_unit)
switched("set_requires_gradient_sync on HSDP", sync, **HSDP)
switched("set_requires_all_reduce", lambda model, is_last: model.set_requires_all_reduce(is_last), **HSDP)
switched(
    "set_requires_all_reduce(recurse=False)",
    lambda model, is_last: layers(model)[1].set_requires_all_reduce(is_last, recurse=False),
    **HSDP,
)
switched("set_is_last_backward on HSDP", lambda model, is_last: model.set_is_last_backward(is_last), **HSDP)
switched("gradients accumulate without a switch", None)


@scenario("set_is_last_backward")
def announce_last(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    seen = []

    def announce(model: Any, is_last: bool) -> None:
        seen.append(gradients(model) if is_last else [])
        model.set_is_last_backward(is_last)

    return outcome(model, train(model, microbatches=3, before=announce), seen)


# ---------------------------------------------------------------- finalization


def finalize(fsdp: Any, model: Any, *, async_op: bool, microbatches: int = 2) -> Outcome:
    """Train with gradients that are finalized by hand, unsynchronized but for the last microbatch."""
    seen: list[object] = [model.finalize_backward()]
    model.set_manual_backward_finalization(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for index in range(3 * microbatches):
        is_last = index % microbatches == microbatches - 1
        model.set_requires_gradient_sync(is_last)
        loss = model(inputs(dist.get_rank(), index)).square().mean()
        loss.backward()
        losses.append(loss.item())
        if not is_last:
            continue
        handle = model.finalize_backward(async_op=async_op)
        seen.append(handle is None)
        if handle is not None:
            seen.append(isinstance(handle, fsdp.GradientReductionHandle))
            seen.append(raises(lambda: model(inputs(0, 0)), RuntimeError, ValueError))
            seen.append(raises(model.finalize_backward, RuntimeError, ValueError))
            handle.wait()
            handle.wait()
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, losses, seen)


@scenario("set_manual_backward_finalization, finalize_backward", needs=SINCE_2_15)
def finalize_by_hand(fsdp: Any) -> Outcome:
    return finalize(fsdp, shard(fsdp), async_op=False)


@scenario("finalize_backward(async_op=True), GradientReductionHandle.wait", needs=SINCE_2_15)
def finalize_later(fsdp: Any) -> Outcome:
    return finalize(fsdp, shard(fsdp), async_op=True)


@scenario("finalize_backward on HSDP", needs=SINCE_2_15, num_ranks=4)
def finalize_on_two_axes(fsdp: Any) -> Outcome:
    return finalize(fsdp, hsdp(fsdp), async_op=True, microbatches=1)


@scenario("finalize_backward is refused", needs=SINCE_2_15)
def finalize_refused(fsdp: Any) -> Outcome:
    """By parts of the model, in a backward, without manual finalization; and a handle that was reset."""
    model = shard(fsdp)
    errors = (RuntimeError, ValueError)

    def step() -> None:
        model(inputs(dist.get_rank(), 0)).square().mean().backward()

    step()
    seen = [raises(model.finalize_backward, *errors)]
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    seen.append(raises(lambda: layers(model)[0].set_manual_backward_finalization(True), *errors))
    seen.append(raises(layers(model)[0].finalize_backward, *errors))
    layers(model)[2].register_forward_hook(
        lambda module, args, out: (
            out.register_hook(lambda gradient: seen.append(raises(model.finalize_backward, *errors))) and None
        )
    )
    step()
    seen.append(raises(lambda: model.set_manual_backward_finalization(False), *errors))
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    seen.append(raises(handle.wait, *errors))
    step()
    model.finalize_backward()
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    return outcome(model, [], seen, gradients(model))


# ---------------------------------------------------------------- resharding


@scenario("set_keep_unsharded_storage", needs=SINCE_2_15)
def keep_storage(fsdp: Any) -> Outcome:
    """Addresses of gathered weights stay from step to step, and the weights are those of the last step."""
    model = shard(fsdp, reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    seen: list[set[int]] = [set() for _ in layers(model)]
    for layer, found in zip(layers(model), seen, strict=True):
        layer.register_forward_hook(lambda module, args, out, found=found: found.add(module.up.weight.data_ptr()))
    losses = train(model)
    model.set_keep_unsharded_storage(False)
    return outcome(model, losses + train(model), [len(found) > 0 for found in seen], shows_dtensors(model))


@scenario("set_keep_unsharded_storage(recurse=False)", needs=SINCE_2_15)
def keep_storage_of_one_unit(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    layer, seen = layers(model)[0], set()
    layer.set_keep_unsharded_storage(True, recurse=False)
    layer.register_forward_hook(lambda module, args, out: seen.add(module.up.weight.data_ptr()))
    losses = train(model)
    return outcome(model, losses, len(seen))


@scenario("set_reshard_after_forward")
def choose_reshard_after_forward(fsdp: Any) -> Outcome:
    model = shard(fsdp, reshard_after_forward=True)
    seen = []
    for choice, recurse in ((False, False), (False, True), (True, True)):
        model.set_reshard_after_forward(choice, recurse)
        loss = model(inputs(dist.get_rank(), 1)).square().mean()
        seen.append(shows_dtensors(model))
        loss.backward()
        model.zero_grad()
    layers(model)[0].set_reshard_after_forward(reshard_after_forward=False, recurse=False)
    refuses = raises(lambda: model.set_reshard_after_forward("no"), ValueError)
    return outcome(model, train(model), seen, refuses)


@scenario("set_reshard_after_backward")
def choose_reshard_after_backward(fsdp: Any) -> Outcome:
    model = shard(fsdp)

    def reshard_last(model: Any, is_last: bool) -> None:
        model.set_reshard_after_backward(is_last)
        model.set_requires_gradient_sync(is_last)

    losses = train(model, microbatches=2, before=reshard_last)
    return outcome(model, losses, shows_dtensors(model))


@scenario("set_reshard_after_backward(recurse=False)")
def keep_one_unit_after_backward(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers(model)[1].set_reshard_after_backward(False, recurse=False)
    model(inputs(dist.get_rank(), 1)).square().mean().backward()
    layers(model)[1].set_reshard_after_backward(True)
    # model.zero_grad() leaves the sharded gradients of a gathered layer in FSDP2.
    optimizer.zero_grad()
    return outcome(model, train(model, optimizer=optimizer))


@scenario("set_unshard_in_backward")
def no_gather_for_backward(fsdp: Any) -> Outcome:
    torch.manual_seed(0)
    table: Any = nn.Embedding(11, 7)
    model = nn.Sequential(table, *layers(blocks()))
    for module in model:
        fsdp.fully_shard(module)
    fsdp.fully_shard(model)
    table.set_unshard_in_backward(False)

    def looked_up(model: Any, step: int) -> torch.Tensor:
        return model((torch.arange(5) * (dist.get_rank() + 2) + step) % 11).square().mean()

    return outcome(model, train(model, loss_of=looked_up))


# ---------------------------------------------------------------- units of several modules


class Headed(nn.Module):
    """Blocks and a norm; the head is for others to call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks().layers
        torch.manual_seed(1)
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in layers(self):
            x = layer(x)
        return self.norm(x)


def headed(fsdp: Any, **options: Any) -> Any:
    """Shard each layer, norm and head together, and the model."""
    model = Headed()
    for unit in (*layers(model), [model.norm, model.head], model):
        fsdp.fully_shard(unit, **options)
    return model


@scenario("units of which a forward runs some modules", needs=SINCE_2_15)
def loss_in_chunks(fsdp: Any) -> Outcome:
    """The head for one chunk after the other: a backward for each, without synchronization but in the last."""
    model, seen = headed(fsdp), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        hidden = model(inputs(dist.get_rank(), step))
        seen.append(shows_dtensors(model.head))
        leaf = hidden.detach().requires_grad_()
        model.set_requires_gradient_sync(False)
        for chunk in leaf.chunk(2):
            loss = model.head(chunk).square().mean()
            seen.append(shows_dtensors(model.head))
            loss.backward()
            losses.append(loss.item())
        model.set_requires_gradient_sync(True)
        hidden.backward(leaf.grad)
        seen += [shows_dtensors(model.head), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, losses, seen)


@scenario("units of which a forward runs some modules, one loss", needs=SINCE_2_15)
def one_loss_of_chunks(fsdp: Any) -> Outcome:
    model, seen = headed(fsdp, reshard_after_forward=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with torch.no_grad():
            model.head(model(inputs(dist.get_rank(), 9)))
        seen.append(list(model.state_dict()))
        hidden = model(inputs(dist.get_rank(), step))
        loss = torch.stack([model.head(chunk).square().mean() for chunk in hidden.chunk(2)]).sum()
        loss.backward()
        losses.append(loss.item())
        seen += [shows_dtensors(model), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, losses, seen)


@scenario("casts of modules called by themselves", needs=SINCE_2_15)
def casts_of_each_module(fsdp: Any) -> Outcome:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model, seen = headed(fsdp, mp_policy=policy), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(args[0].dtype))
    hidden = model(inputs(dist.get_rank(), 0))
    found = [hidden.dtype, *(model.head(chunk).dtype for chunk in hidden.chunk(2))]
    return Outcome((), {}, (found, seen))


# ---------------------------------------------------------------- prefetch


@scenario("set_modules_to_forward_prefetch")
def prefetch_forward(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    first, second, third = layers(model)
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second, third])
    second.set_modules_to_forward_prefetch([])
    refuses = raises(lambda: model.set_modules_to_forward_prefetch([nn.Linear(2, 2)]), ValueError)
    return outcome(model, train(model), refuses)


@scenario("set_modules_to_backward_prefetch")
def prefetch_backward(fsdp: Any) -> Outcome:
    model = shard(fsdp, reshard_after_forward=True)
    first, second, third = layers(model)
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([first])
    refuses = raises(lambda: model.set_modules_to_backward_prefetch([nn.Linear(2, 2)]), ValueError)
    return outcome(model, train(model), refuses)


@scenario("_set_unshard_async_op")
def unshard_async_op(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    model._set_unshard_async_op(True)
    losses = train(model, steps=2)
    model._set_unshard_async_op(False)
    return outcome(model, losses + train(model, steps=1))


# ---------------------------------------------------------------- other entry points


class Encoder(nn.Module):
    """A model with a second way in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.encode(x))

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Return (..., 13) for (..., 7)."""
        return torch.tanh(self.up(x)) * scale


@scenario("register_fsdp_forward_method")
def second_method(fsdp: Any) -> Outcome:
    model = fsdp.fully_shard(Encoder())
    seen = [raises(lambda: fsdp.register_fsdp_forward_method(model, "no_such_method"), ValueError)]
    fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "no_such_method")
    fsdp.register_fsdp_forward_method(model, "encode")
    losses = train(
        model, loss_of=lambda _, step: model.encode(inputs(dist.get_rank(), step), scale=2.0).square().mean()
    )
    return outcome(model, losses, seen[:1])


@scenario("share_comm_ctx")
def two_roots(fsdp: Any) -> Outcome:
    model = blocks()
    first, second, third = layers(model)
    for layer in (first, second, third):
        fsdp.fully_shard(layer)
    returned = fsdp.share_comm_ctx([first, second, third])
    refuses = raises(lambda: fsdp.share_comm_ctx([nn.Linear(2, 2)]), ValueError)
    fsdp.share_comm_ctx([])
    return outcome(model, train(model), returned, refuses)


@scenario("fully_shard.state, _get_fsdp_state")
def state(fsdp: Any) -> Outcome:
    model = shard(fsdp)
    own = fsdp.fully_shard.state(model)
    same = own is model._get_fsdp_state()
    others = len({id(fsdp.fully_shard.state(layer)) for layer in (model, *layers(model))})
    return Outcome((), {}, (same, others))
