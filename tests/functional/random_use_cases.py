"""Programs that went wrong once, as small as they get, each under a sentence that says what happens in it."""

from collections.abc import Iterator, Mapping
from itertools import product

from tests.functional.random_models import Part, Wrap
from tests.functional.random_side_parts import SIDE_KINDS
from tests.functional.random_use import Program

__all__ = ["CASES"]

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp")
ONE_AXIS = ALL[:4]
MESH = (2, 1)
ROOT = ("",)
AGAIN = "forward, backward, step"


def _wraps(strategy: str, *paths: str, reshard: bool | int | None = None) -> tuple[Wrap, ...]:
    return tuple(Wrap((path,), strategy, reshard) for path in paths)


def _two(actions: str, strategy: str = "optim_grads_params", **options: object) -> Program:
    """Return a program of a model of two units in a third one."""
    part = Part("gated", (Part("linear", size=3), Part("mlp", (), 4)), 2)
    return Program(part, actions, _wraps(strategy, "parts.0", "parts.1", ""), mesh=MESH, **options)


def _one(part: Part, actions: str, strategy: str = "optim_grads_params", **options: object) -> Program:
    """Return a program of a model with one part beside a linear one, all in one unit."""
    whole = Part("gated", (part, Part("linear", size=3)), 2)
    return Program(whole, actions, (Wrap(ROOT, strategy),), mesh=MESH, **options)


def _side_outputs() -> Iterator[tuple[str, Program]]:
    actions = "forward, backward, step, zero_grad none, forward, backward, step"
    for kind in SIDE_KINDS:
        for size, use in enumerate(("both results", "the second result", "the first result")):
            side = Part(kind, (Part("linear", size=3), Part("linear", size=2)), size)
            part = Part("gated", (side, Part("linear", size=2)), 2)
            wraps = _wraps("optim_grads_params", "parts.0.both", "parts.1", "", reshard=(None, True)[size % 2])
            if size < 2:
                yield f"results by {kind}, {use} used", Program(part, actions, wraps, is_guarded=size % 2 == 0)


def _interruptions() -> Iterator[tuple[str, Program]]:
    for strategy in ALL:
        yield (
            f"{strategy}: a forward raises after a microbatch that was not reduced, gradients are cleared",
            _two("forward, backward flag, forward bomb 1 error, zero_grad none, forward, backward, step", strategy),
        )
        yield (
            f"{strategy}: a forward raises after a microbatch, training goes on",
            _two("forward, backward microbatch, forward early 2 interrupt, forward, backward, step", strategy),
        )
        yield (
            f"{strategy}: a backward raises after a microbatch, gradients are cleared",
            _two(
                "forward, backward, forward fuse 1 error, backward, zero_grad none, forward, backward, step", strategy
            ),
        )
        yield (
            f"{strategy}: a backward is interrupted after a microbatch that was not reduced, gradients are cleared",
            _two(
                "forward, backward flag, forward fuse 1 interrupt, backward, zero_grad none, forward, backward",
                strategy,
            ),
        )
        yield (
            f"{strategy}: a backward raises and training goes on",
            _two("forward, backward, step, forward fuse 2 error, backward, forward, backward, step", strategy),
        )


def _thrown_away() -> Iterator[tuple[str, Program]]:
    for strategy in ALL:
        for how in ("no_sync", "microbatch"):
            yield (
                f"{strategy}: a microbatch by {how} is thrown away",
                _two(f"forward, backward {how}, zero_grad none, forward, backward, step", strategy),
            )
        yield (
            f"{strategy}: gradients are cleared between forward and backward",
            _two("forward, backward, step, forward, zero_grad model, backward, step, zero_grad model", strategy),
        )
        yield (
            f"{strategy}: gradients are cleared after a forward without backward",
            _two("forward, backward, evaluate train, zero_grad model, forward, backward, step", strategy),
        )
    yield (
        "the model clears gradients while weights stay gathered",
        _two("forward, backward, step, zero_grad model, forward, backward, step", keeps_weights=True),
    )


def _frozen() -> Iterator[tuple[str, Program]]:
    for strategy in ALL:
        for face in ("kept", "shown"):
            yield (
                f"{strategy}: a parameter as it is {face} is frozen before backward",
                _two(f"forward, freeze 2 {face}, backward, step, zero_grad none, forward, backward", strategy),
            )
    yield "all are frozen before backward", _two("forward, freeze all kept, backward")
    yield "all are frozen between two forwards", _two("forward, freeze all shown, forward, backward")


def _replaced() -> Iterator[tuple[str, Program]]:
    for how in ("like", "whole"):
        for then in ("remake", "keep"):
            yield f"a {how} weight put in before use, {then}", _two(f"replace 4 {how} {then}, forward, backward, step")
            yield (
                f"a {how} weight put in after a step, {then}",
                _two(
                    f"forward, backward, step, zero_grad none, replace 4 {how} {then}, forward, backward, step, forward"
                ),
            )
    yield (
        "a weight replaced between backward and clipping",
        _two("forward, backward, replace 4 whole remake, clip ours, step, zero_grad none, forward, backward"),
    )
    linear = Part("gated", (Part("linear", size=3), Part("linear", size=3)), 2)
    for where, paths in (("of one unit", ("",)), ("across units", ("parts.0", "parts.1", ""))):
        wraps = _wraps("optim_grads_params", *paths)
        for name, actions in (
            ("before use", "tie 0 remake, forward, backward, step"),
            ("after a step", "forward, backward, step, zero_grad none, tie 0 keep, forward, backward, step"),
        ):
            yield f"weights {where} are tied {name}", Program(linear, actions, wraps)
    for strategy in ALL:
        yield f"{strategy}: a module is added", _two("add 0 remake, forward, backward, step, forward", strategy)
    yield (
        "a module is added after a step",
        _two("forward, backward, step, zero_grad none, add 1 remake, forward, backward, step, forward"),
    )


def _changed() -> Iterator[tuple[str, Program]]:
    # Parameter 4 is one of the unit that runs last. What a root keeps gathered is shown as it is, as by FSDP2: a change
    # of it is refused by the next forward.
    for strategy in ALL:
        for kind in ("clamped", "renormed"):
            yield (
                f"{strategy}: a weight is {kind} in forward",
                _one(Part(kind, (), 3), "forward, backward, step, zero_grad none, forward, backward, step", strategy),
            )
        for how in ("mul", "assign", "inplace", "foreach"):
            yield (
                f"{strategy}: weights change by {how} while a unit lingers",
                _two(f"evaluate train, weight {how} 4 shown, evaluate no_grad, forward, backward", strategy),
            )
            yield (
                f"{strategy}: weights that somebody kept change by {how} while a unit lingers",
                _two(f"evaluate train, weight {how} 4 kept, forward, backward", strategy),
            )
        yield (
            f"{strategy}: weights change while they are unsharded",
            _two("poke 0, poke 1, forward, backward", strategy),
        )
        yield f"{strategy}: weights unsharded after a step", _two("forward, backward, step, unshard 1, look", strategy)
        yield f"{strategy}: another model's weights", _two("functional sharded, functional whole, forward", strategy)


def _hooked() -> Iterator[tuple[str, Program]]:
    yield "a hook on what a root keeps gathered", _two("forward, posthook all shown, backward, step")
    for strategy in ("no_shard", "optim_grads_params", "hfsdp"):
        for face in ("kept", "shown"):
            for hook in ("hook", "posthook"):
                yield (
                    f"{strategy}: a {hook} on parameters as they are {face}",
                    _two(f"{hook} all {face}, forward, backward, step, zero_grad none, forward, backward", strategy),
                )
                yield (
                    f"{strategy}: a {hook} on parameters as they are {face} before backward",
                    _two(f"forward, {hook} 4 {face}, backward, step, zero_grad none, forward, backward", strategy),
                )


def _own_gradients() -> Iterator[tuple[str, Program]]:
    for strategy in ("no_shard", "optim", "optim_grads_params", "hfsdp"):
        for how in ("ones", "set"):
            yield (
                f"{strategy}: gradients of one's own by {how}, clipped",
                _two(f"grad {how} all kept, clip ours, step, forward, backward, clip ours, step", strategy),
            )
        yield (
            f"{strategy}: backward adds to gradients of one's own, clipped",
            _two("grad set all kept, clip ours, forward, backward, forward, backward, clip ours, step", strategy),
        )
        # The second matrices of two alike layers, and two vectors of one of them.
        alike = Part("gated", (Part("linear", size=3), Part("linear", size=3)), 2)
        for then in ("step", "forward, backward, step", "zero_grad zero, forward, backward, step"):
            yield (
                f"{strategy}: gradients are exchanged; {then}",
                Program(
                    alike,
                    f"forward, backward, swap 3 6, swap 4 7, {then}",
                    _wraps(strategy, "parts.0", "parts.1", ""),
                    mesh=MESH,
                ),
            )
    yield "gradients asked of the sharded parameters", _two("autograd kept, forward, backward")
    for how in ("none", "ones", "zero"):
        actions = f"forward, backward, forward, grad {how} all shown, backward, step"
        yield f"gradients of what a model shows after forward: {how}", _two(actions, keeps_weights=True)


def _unused() -> Iterator[tuple[str, Program]]:
    for strategy in ALL:
        yield (
            f"{strategy}: nobody uses a weight, and momentum moves it not",
            _one(Part("spare", size=3), "forward, backward, step, forward, backward, step", strategy, optimizer="adam"),
        )
        yield (
            f"{strategy}: a weight that nobody uses is frozen between two microbatches",
            _one(Part("spare", size=3), "forward, backward no_sync, forward, freeze 5 shown, backward, step", strategy),
        )
        sometimes = Part("sometimes", (Part("linear", size=3),), 3)
        step = "forward, backward microbatch, forward, backward last, clip ours, step, zero_grad none"
        yield (
            f"{strategy}: some ranks use a weight in some microbatches",
            _one(sometimes, ", ".join([step] * 3), strategy, optimizer="adam"),
        )
    yield (
        "a sum is set to zero in which a weight has no gradient",
        _one(Part("spare", size=3), "forward, backward no_sync, zero_grad zero, forward, backward, step"),
    )
    yield (
        "a hook on a weight that the second of two sums does not use",
        _one(
            Part("sometimes", (Part("linear", size=3),), 3),
            ", ".join(("posthook all kept", *["forward, backward"] * 5, "step")),
        ),
    )


def _uneven() -> Iterator[tuple[str, Program]]:
    checkpoint = Part("checkpoint", (Part("linear", size=5), Part("sometimes", (Part("norm"),))), 4)
    before = Part("mlp", (Part("sometimes", (Part("linear", size=5), Part("empty", size=3)), 2),))
    actions = ", ".join(["forward, backward, step, zero_grad zero"] * 3)
    yield (
        "some ranks use none of the weights of a unit inside of another one",
        Program(
            Part("gated", (before, checkpoint), 2),
            actions,
            _wraps("optim_grads_params", "parts.0.up", "parts.0", "parts.1.parts.1", "parts.1", ""),
            mesh=(1, 3),
        ),
    )
    yield (
        "a weight of a unit that some ranks do not use is frozen before backward",
        Program(
            Part("gated", (Part("sometimes", (Part("linear"),)), Part("linear")), 2),
            "forward, freeze 2 kept, backward, step, zero_grad none, forward, backward, step",
            _wraps("optim_grads_params", "parts.0", ""),
            mesh=(1, 3),
        ),
    )


def _loaded() -> Iterator[tuple[str, Program]]:
    for strategy in ALL:
        for accumulates in ("", " no_sync"):
            actions = f"forward, backward{accumulates}, load assign, step, forward, backward, step"
            yield f"{strategy}: weights are assigned after a backward{accumulates}", _two(actions, strategy)


def _loaded_into_replaced() -> Iterator[tuple[str, Program]]:
    for how in ("whole", "sharded"):
        actions = f"forward, backward, step, zero_grad none, replace 1 like keep, load {how}, forward, backward, step"
        yield f"weights are loaded, {how}, after one was replaced", _two(actions)


def _kept() -> Iterator[tuple[str, Program]]:
    actions = f"{AGAIN}, functional sharded, functional whole, {AGAIN}"
    yield "another model's weights while old ones are gathered", _two(actions, keeps_weights=True)
    yield "gradients asked of what a model shows after forward", _two("autograd shown, forward, backward, step")


def _saved() -> Iterator[tuple[str, Program]]:
    for strategy in ALL:
        for optimizer in ("adam", "flat adamw"):
            actions = f"save, {AGAIN}, restore, {AGAIN}, save, {AGAIN}, restore, {AGAIN}"
            yield f"{strategy}: {optimizer} is wound back", _two(actions, strategy, optimizer=optimizer)
        sum_under_way = f"save, forward, backward no_sync, restore, {AGAIN}"
        yield f"{strategy}: a sum under way is wound back", _two(sum_under_way, strategy)
    yield "what is gathered is wound back", _two(f"{AGAIN}, save, {AGAIN}, restore, {AGAIN}", keeps_weights=True)


def _recomputed() -> Iterator[tuple[str, Program]]:
    for size in (3, 4):
        inner = Part("sum", (Part("checkpoint", (Part("linear"),), size), Part("linear")), 4)
        part = Part("gated", (Part("linear"), inner), 2)
        for strategy in ("optim_grads", "optim_grads_params", "hfsdp"):
            yield (
                f"{strategy}: a part of a unit is recomputed ({size}) in the backward of two forwards",
                Program(part, "forward, forward, backward, step", _wraps(strategy, "parts.1", ""), mesh=MESH),
            )


def _dtypes() -> Iterator[tuple[str, Program]]:
    for dtype, frozen in (("float64", ""), ("float64", "first"), ("bfloat16", "all"), ("float16", "all")):
        part = Part("linear", size=3, dtype=dtype, frozen=frozen)
        yield f"a part in {dtype}, {frozen or 'nothing'} frozen", _one(part, f"{AGAIN}, zero_grad zero, {AGAIN}")
    part = Part("gated", (Part("linear", size=3), Part("mlp", (), 4)), 2)
    for strategy, policy in product(ALL, ("fp64 main weights", "fp64 gradients")):
        wraps = tuple(Wrap((path,), strategy, policy=policy) for path in ("parts.0", ""))
        actions = f"forward, backward no_sync, {AGAIN}, zero_grad none, {AGAIN}"
        yield f"{strategy}: {policy}", Program(part, actions, wraps, mesh=MESH, optimizer="adam", is_adapted=True)


def _others() -> Iterator[tuple[str, Program]]:
    yield (
        "integers among the parameters of a flat optimizer",
        _one(Part("masked", size=2), "forward, backward, step", optimizer="foreach sgd"),
    )
    for groups in (((0,), (0, 1)), ((0, 1), (1, 2))):
        part = Part("gated", (Part("linear", size=3),), 2)
        wraps = _wraps("optim_grads_params", "parts.0", "")
        yield (
            f"groups {groups} were made before",
            Program(part, "forward, backward, step", wraps, mesh=(1, 3), groups=groups),
        )


CASES: Mapping[str, Program] = {
    name: program
    for cases in (
        _side_outputs, _interruptions, _thrown_away, _frozen, _replaced, _changed, _hooked, _own_gradients, _unused,
        _uneven, _loaded, _loaded_into_replaced, _kept, _saved, _recomputed, _dtypes, _others,
    )
    for name, program in cases()
}  # fmt: skip
