"""A table of uses of a model: a sentence, a program, and the outcome that it must have.

Many of these uses failed once. "add" stands for forward and backward of a microbatch before the last, "train" for those
of the last one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.functional.random_use.models import SIDE_KINDS, Part, Wrap
from tests.functional.random_use.program import Program

__all__ = ["CASES", "Case"]

ZERO3 = "optim_grads_params"
ALL = (ZERO3, "no_shard", "optim", "optim_grads", "hsdp", "hfsdp")
SOME = (ZERO3, "no_shard", "hfsdp")
FOUR = (*SOME, "optim")
# Ways to accumulate; "unfused" adds weight gradients outside of their buffers.
HOWS = {"no_sync": "none", "microbatch": "unfused", "flag": "none"}
MICROBATCHES = {"add": "forward, backward *", "train": "forward, backward"}
LINEAR, WIDER, FROZEN = Part("linear", size=3), Part("linear", size=5), Part("linear", size=3, frozen="all")


@dataclass(frozen=True)
class Model:
    """The model of a use: its parts, inside a gated one, and the paths of its units ("+" joins several of one unit)."""

    parts: tuple[Part, ...]
    units: tuple[str, ...] = ("parts.0", "parts.1", "")
    options: Mapping[str, Any] = field(default_factory=dict)
    reshard: bool | int | None = None
    kind: str = "gated"
    size: int = 2

    def program(self, actions: str, strategy: str, policy: str = "none", **options: Any) -> Program:
        """Return a program of this model."""
        wraps = [Wrap(tuple(path.split("+")), strategy, self.reshard, policy) for path in self.units]
        whole = Part(self.kind, self.parts, self.size)
        return Program(whole, actions, tuple(wraps), **{"mesh": (2, 1), **self.options, **options})


def _sometimes(*parts: Part, size: int = 3) -> Part:
    return Part("sometimes", parts or (LINEAR,), size)


MODELS = {
    "two": Model((LINEAR, Part("mlp", (), 4))),
    # Wrap 1, which "fuse 1" breaks, has weights 5 to 8.
    "three": Model((LINEAR, Part("mlp", (), 3), Part("linear", size=2)), ("parts.0", "parts.1", "parts.2", "")),
    "kept": Model((LINEAR, Part("mlp", (), 4)), reshard=False),
    "one unit": Model((LINEAR, Part("mlp", (), 4)), ("",)),
    "no root": Model((LINEAR, Part("mlp", (), 4)), ("parts.0", "parts.1"), kind="chain"),
    "nested": Model((LINEAR, Part("mlp", (), 4)), ("parts.1.up", "parts.1", "parts.0", "")),
    "a unit of two": Model((LINEAR, WIDER, LINEAR), ("parts.0", "parts.1+parts.2", "")),
    "alike": Model((LINEAR, LINEAR)),
    "alike, one unit": Model((LINEAR, LINEAR), ("",)),
    "frozen first": Model((FROZEN, LINEAR, WIDER), ("parts.0", "parts.1", "parts.2", "")),
    "frozen inside": Model((LINEAR, FROZEN, WIDER), ("parts.0", "parts.1", "parts.2", "")),
    "partly frozen": Model((Part("linear", size=3, frozen="first"), Part("norm", frozen="first"))),
    "tied inside": Model((LINEAR, LINEAR), ("",), {"ties": (("parts.0", "parts.1"),)}),
    "tied at the root": Model((LINEAR, WIDER, LINEAR), ("parts.1", ""), {"ties": (("parts.0", "parts.2"),)}),
    "clamped": Model((Part("clamped", (), 3), LINEAR), ("",)),
    "renormed": Model((Part("renormed", (), 3), LINEAR), ("",)),
    "spare": Model((Part("spare", size=3), LINEAR), ("",)),
    "sometimes": Model((_sometimes(), LINEAR), ("",)),
    "blocks sometimes": Model(
        (_sometimes(size=0), _sometimes(WIDER), _sometimes(size=2)),
        ("parts.0", "parts.1", "parts.2", ""), {"mesh": (1, 3)},
    ),
    "first sometimes": Model((_sometimes(Part("linear")), Part("linear")), ("parts.0", ""), {"mesh": (1, 3)}),
    "sometimes inside": Model(
        (Part("mlp", (_sometimes(WIDER, Part("empty", size=3), size=2),)),
         Part("checkpoint", (WIDER, _sometimes(Part("norm"))), 4)),
        ("parts.0.up", "parts.0", "parts.1.parts.1", "parts.1", ""), {"mesh": (1, 3)},
    ),
    "repeated": Model((Part("repeat", (LINEAR, WIDER), 3), Part("again", size=0)), ("parts.0.parts.0", "")),
    "the first of two": Model((LINEAR, Part("pick", (LINEAR, WIDER), 0)), ("parts.0", "parts.1.both", "")),
    "the last of two": Model((LINEAR, Part("pick", (LINEAR, WIDER), 1)), ("parts.0", "parts.1.both", "")),
    "one of two by rank": Model((LINEAR, Part("pick", (LINEAR, WIDER), 2)), ("parts.0", "parts.1.both", "")),
    "region in region": Model(
        (LINEAR, Part("checkpoint", (Part("checkpoint", (LINEAR,), 3),), 3)),
        ("parts.1.parts.0.parts.0", "parts.1.parts.0", ""),
    ),
    "integers": Model((Part("masked", size=2), LINEAR), ("",)),
    "groups 0 and 0 1": Model((LINEAR,), ("parts.0", ""), {"mesh": (1, 3), "groups": ((0,), (0, 1))}),
    "groups 0 1 and 0 3": Model((LINEAR,), ("parts.0", ""), {"mesh": (2, 2), "groups": ((0, 1), (0, 3))}),
    "groups 0 1 and 1 2": Model((LINEAR,), ("parts.0", ""), {"mesh": (1, 3), "groups": ((0, 1), (1, 2))}),
}  # fmt: skip
for _dtype, _frozen in (("float64", ""), ("float64", "first"), ("bfloat16", "all"), ("float16", "all")):
    MODELS[f"{_dtype} {_frozen}"] = Model((Part("linear", size=3, dtype=_dtype, frozen=_frozen), LINEAR), ("",))
# Recomputed regions, reentrant and not: one part, two parts, parts in a unit, parts that some ranks skip, all parts.
REGIONS = [f"{kind} {how}" for kind in ("one", "two", "within", "frozen", "sometimes", "around") for how in (3, 4)]
for _how in (3, 4):
    MODELS |= {
        f"one {_how}": Model(
            (Part("checkpoint", (LINEAR,), _how), Part("checkpoint", (WIDER,), _how)),
            ("parts.0.parts.0", "parts.1.parts.0", ""),
        ),
        f"two {_how}": Model(
            (Part("checkpoint", (LINEAR, WIDER), _how), Part("checkpoint", (WIDER, Part("norm")), _how)),
            ("parts.0.parts.0", "parts.0.parts.1", "parts.1.parts.0", "parts.1.parts.1", ""),
        ),
        f"within {_how}": Model((LINEAR, Part("sum", (Part("checkpoint", (Part("linear"),), _how), LINEAR), 4))),
        f"frozen {_how}": Model(
            (Part("checkpoint", (Part("linear", size=3, frozen="first"),), _how),
             Part("checkpoint", (FROZEN,), _how), WIDER),
            ("parts.0.parts.0", "parts.1.parts.0", "parts.2", ""),
        ),
        f"around {_how}": Model(
            (Part("gated", (LINEAR, WIDER), 2),), ("parts.0.parts.0", "parts.0.parts.1", "parts.0"),
            kind="checkpoint", size=_how,
        ),
        f"sometimes {_how}": Model(
            (Part("checkpoint", (Part("sum", (LINEAR, _sometimes())), WIDER), _how),
             Part("checkpoint", (Part("sum", (WIDER, _sometimes(size=2))),), _how)),
            ("parts.0.parts.0", "parts.0.parts.1", "parts.1.parts.0", ""),
        ),
    }  # fmt: skip


@dataclass(frozen=True)
class Use:
    """Actions, the models and strategies to run them on, and the outcome."""

    actions: str
    models: tuple[str, ...] = ("three",)
    strategies: tuple[str, ...] = (ZERO3,)
    outcome: str = "same"
    options: Mapping[str, Any] = field(default_factory=dict)


def use(actions: str, *models: str, on: tuple[str, ...] = ALL, outcome: str = "same", **options: Any) -> Use:
    """Return a use of one model or several, under all strategies."""
    return Use(actions, models or ("three",), on, outcome, options)


def here(actions: str, *models: str, outcome: str = "same", **options: Any) -> Use:
    """Return a use under ZeRO-3 alone."""
    return Use(actions, models or ("two",), (ZERO3,), outcome, options)


STEP, AGAIN, REFUSED = "forward, backward, step, zero_grad none", "forward, backward, step", "refused"
SUMS = ", ".join(["forward, backward microbatch, forward, backward last, clip ours, step, zero_grad none"] * 3)

USES: dict[str, Use] = {
    # Sums of microbatches, and their use.
    "a microbatch is dropped": use("add, zero_grad none, train"),
    "it is dropped between forward and backward": use("add, forward, zero_grad model, backward, step, zero_grad model"),
    "it is dropped after two forwards": use("add, forward, forward, zero_grad none, backward apart"),
    "a sum is set to zero": here("forward, backward no_sync, zero_grad zero, forward, backward", outcome=REFUSED),
    **{
        f"a sum's gradients of a parameter are set to {how}": here(
            f"forward, backward no_sync, grad {how} 0 kept amid, forward, backward", outcome=REFUSED
        )
        for how in ("none", "ones", "zero")
    },
    "a microbatch on final gradients is dropped": use("train, add, zero_grad none, train"),
    "a microbatch with a penalty is dropped": use(
        "forward penalty kept, backward *, zero_grad none, forward penalty kept, backward *, "
        "forward penalty kept, backward"
    ),
    "a forward has no backward": use("add, forward, drop, train"),
    "of two forwards the first has a backward": use("forward, forward, backward first, drop, train"),
    "of two forwards the second has a backward": use(
        "forward, forward, backward latest, forward, backward latest"
    ),
    "a step has no backward": use("train, step, zero_grad none, forward, step, train"),
    "gradients are cleared after a forward without backward": use(
        "train, evaluate train, zero_grad model, train, step"
    ),
    "the model clears gradients while weights stay gathered": here(
        "forward, backward, step, zero_grad model, forward, backward, step", keeps_weights=True
    ),
    # Errors and interrupts.
    "an error in forward": use("add, forward bomb 1 error, train"),
    "an interrupt in forward": use("add, forward bomb 1 interrupt, add, train"),
    "an interrupt before a part's forward": use("add, forward early 2 interrupt, train, step"),
    "an error in forward, and gradients are cleared": use("add, forward bomb 1 error, zero_grad none, train, step"),
    "an error in forward, and the state is read": use("forward bomb 1 error, state, add, train, step, train"),
    "an error in forward, and weights change": use("train, forward bomb 1 error, weight mul all kept, train, step"),
    "an error in the backward of the first of two forwards": use(
        "forward fuse 1 error, forward, backward first, zero_grad none, backward, step, train"
    ),
    "an error in backward": use("forward fuse 1 error, backward, zero_grad none, train"),
    "an error in backward after a microbatch": use("add, forward fuse 1 error, backward, zero_grad none, add, train"),
    "an error in backward after final ones": use(
        "train, forward fuse 1 error, backward, forward, zero_grad none, backward"
    ),
    "an interrupt in backward": use("add, forward fuse 1 interrupt, backward *, zero_grad none, step, train"),
    "an error in the backward of the second of two forwards": use(
        "forward, forward fuse 1 error, backward latest, zero_grad none, backward, train"
    ),
    "a backward raises and training goes on": use(
        "forward, backward, step, forward fuse 2 error, backward, forward, backward, step", "two", outcome=REFUSED
    ),
    # Frozen and thawed parameters.
    "weights are frozen between forward and backward": use(
        "forward, freeze 0 kept, freeze 3 kept, freeze 10 kept, backward, thaw all kept, step, zero_grad none, train, "
        "freeze 8 kept"
    ),
    "weights as shown are frozen between forward and backward": use(
        f"forward, freeze 2 shown, backward, {STEP}", "two"
    ),
    "weights are frozen after a microbatch": use("add, freeze 0 kept, freeze 3 kept, train, step"),
    "weights are frozen after final gradients": use("train, freeze 0 kept, freeze 3 kept, add, train"),
    **{
        f"weights are frozen for an evaluation{where} between forward and backward{then}": use(
            f"{before}forward, freeze 0 kept, freeze 3 {face}, evaluate {how}, thaw all {face}, {backward}, step, "
            "forward, backward",
            "three", "one unit", "frozen inside", "one 3", "two 4", on=on,
        )
        for where, face, how, on in (
            ("", "kept", "no_grad", ALL), (" as shown", "shown", "no_grad", SOME),
            (" that is recorded", "kept", "train", SOME),
        )
        for then, before, backward in (
            ("", "", "backward"), (" and microbatches", "add, ", "backward no_sync, train"),
        )
    },
    "a weight is thawed between forward and backward": use(
        "freeze 0 kept, freeze 3 kept, forward, thaw all kept, backward, step, forward, backward", "three", "one unit"
    ),
    "a weight is thawed between forward and a backward that runs it again": use(
        "freeze 0 kept, forward, thaw all kept, backward, step, forward, backward", "one 3", "two 3"
    ),
    "other weights are frozen in every step": use(
        "freeze 0 kept, freeze 5 kept, train, step, zero_grad none, thaw all kept, freeze 3 kept, freeze 8 shown, add, "
        "train, step, zero_grad none, thaw all kept, train, step, forward"
    ),
    "a part that was frozen when it was sharded is thawed": use(
        f"{STEP}, thaw all kept, {STEP}, {AGAIN}, forward", "frozen first", "frozen inside", "partly frozen"
    ),
    "all are frozen before backward": here("forward, freeze all kept, backward"),
    "all are frozen between two forwards": here("forward, freeze all shown, forward, backward"),
    # Replaced, tied and added parameters.
    **{
        f"a {how} weight put in {when}, {then}": here(f"{before}replace 4 {how} {then}, {AGAIN}", outcome=REFUSED)
        for how in ("like", "whole") for then in ("remake", "keep")
        for when, before in (("before use", ""), ("after a step", f"{STEP}, "))
    },
    "a weight replaced between backward and clipping": here(
        "forward, backward, replace 4 whole remake, clip ours, step", outcome=REFUSED
    ),
    "weights are tied before use": here(f"tie 0 remake, {AGAIN}", "alike", "alike, one unit", outcome=REFUSED),
    "weights are tied after a step": here(f"{STEP}, tie 0 keep, {AGAIN}", "alike", "alike, one unit", outcome=REFUSED),
    "a module is added": use(f"add 0 remake, {AGAIN}, forward", "two", outcome=REFUSED),
    "a module is added after a step": here(f"{STEP}, add 1 remake, {AGAIN}, forward", outcome=REFUSED),
    **{
        f"{how} weights are loaded after one was replaced": here(
            f"{STEP}, replace 1 like keep, load {how}, {AGAIN}", outcome=REFUSED
        )
        for how in ("whole", "sharded")
    },
    "weights are assigned after a backward": use(f"forward, backward, load assign, step, {AGAIN}", "two"),
    "weights are assigned after a microbatch": use(f"forward, backward no_sync, load assign, step, {AGAIN}", "two"),
    # Changed weights. The root's gathered weights are shown whole, as in FSDP2: the next forward refuses a change of
    # them.
    "a weight is clamped in forward": use(f"{STEP}, {AGAIN}", "clamped", outcome=REFUSED),
    "a weight is renormed in forward": use(f"{STEP}, {AGAIN}", "renormed", outcome=REFUSED),
    **{
        f"weights{who} change by {how} while a unit lingers": use(
            f"evaluate train, weight {how} 4 {face}, evaluate no_grad, forward, backward", "two"
        )
        for how in ("mul", "assign", "inplace", "foreach")
        for face, who in (("shown", ""), ("kept", " that somebody kept"))
    },
    "weights change while they are unsharded": use("poke 0, poke 1, forward, backward", "two", outcome=REFUSED),
    "weights unsharded after a step": use("forward, backward, step, unshard 1, look", "two"),
    "gradients are clipped while weights are gathered": use(f"forward, backward, unshard 0, clip ours, {AGAIN}", "two"),
    "gradients are clipped after another forward": use(
        f"forward, backward, evaluate train, clip ours, step, zero_grad none, {AGAIN}", "two", "one unit"
    ),
    "another model's weights": use("functional sharded, functional whole, forward", "two"),
    "another model's weights while old ones are gathered": here(
        f"{AGAIN}, functional sharded, functional whole, {AGAIN}", keeps_weights=True
    ),
    # Hooks, and gradients set by the caller.
    "a hook on what a root keeps gathered": here("forward, posthook all shown, backward, step"),
    **{
        f"a {hook} on parameters as they are {face}{when}": use(actions, "two", on=SOME)
        for face in ("kept", "shown") for hook in ("hook", "posthook")
        for when, actions in (
            ("", f"{hook} all {face}, {STEP}, forward, backward"),
            (" before backward", f"forward, {hook} 4 {face}, backward, step, zero_grad none, forward, backward"),
        )
    },
    "a hook on a weight that the second of two sums does not use": here(
        ", ".join(("posthook all kept", *["forward, backward"] * 5, "step")), "sometimes"
    ),
    **{
        f"gradients of one's own by {how}, clipped": use(
            f"grad {how} all kept, clip ours, {AGAIN}, clip ours, step", "two", on=FOUR
        )
        for how in ("ones", "set")
    },
    "backward adds to gradients of one's own, clipped": use(
        "grad set all kept, clip ours, forward, backward, forward, backward, clip ours, step", "two", on=FOUR
    ),
    # The second matrices of two alike layers, and two vectors of one of them.
    **{
        f"gradients are exchanged; {then}": use(
            f"forward, backward, swap 3 6, swap 4 7, {then}", "alike", on=FOUR
        )
        for then in ("step", AGAIN, f"zero_grad zero, {AGAIN}")
    },
    **{
        f"gradients of what a model shows after forward: {how}": here(
            f"forward, backward, forward, grad {how} all shown, backward, step", keeps_weights=True
        )
        for how in ("none", "ones", "zero")
    },
    "gradients asked of the sharded parameters": here("autograd kept, forward, backward"),
    "gradients asked of what a model shows after forward": here("autograd shown, forward, backward, step"),
    # Weights used on no rank, on some ranks, or several times.
    "nobody uses a weight, and momentum moves it not": use(f"{AGAIN}, {AGAIN}", "spare", optimizer="adam"),
    "a weight that nobody uses is frozen between two microbatches": use(
        "forward, backward no_sync, forward, freeze 5 shown, backward, step", "spare"
    ),
    "a sum is set to zero in which a weight has no gradient": here(
        "forward, backward no_sync, zero_grad zero, forward, backward, step", "spare", outcome=REFUSED
    ),
    "some ranks use a weight in some microbatches": use(SUMS, "sometimes", optimizer="adam"),
    "some ranks use a part in some steps": here(
        ", ".join([STEP.replace("none", "zero")] * 6), "blocks sometimes", "sometimes inside", optimizer="adam"
    ),
    "a weight of a unit that some ranks do not use is frozen before backward": here(
        f"forward, freeze 2 kept, backward, step, zero_grad none, {AGAIN}", "first sometimes"
    ),
    "two steps": use(
        f"{STEP}, {STEP}, forward", "two", "kept", "one unit", "no root", "nested", "a unit of two", "frozen first",
        "frozen inside", "partly frozen", "tied inside", "tied at the root", "repeated", "the first of two",
        "the last of two", "one of two by rank", *REGIONS,
    ),
    "two steps of foreach optimizers": here(f"{STEP}, {STEP}, forward", optimizer="foreach adamw"),
    "two steps of a fused optimizer": here(f"{STEP}, {STEP}, forward", optimizer="fused adamw"),
    "two steps of foreach SGD": here(f"{STEP}, {STEP}, forward", "two", "integers", optimizer="foreach sgd"),
    "two forwards before one backward": here("forward, forward, backward, step, forward", "two", "repeated", *REGIONS),
    "two forwards before one backward through regions": use(
        "forward, forward, backward, step, forward", "one 3", "within 3", on=("hfsdp", "hsdp", "optim")
    ),
    "a region in a region": use(f"{STEP}, {AGAIN}", "region in region"),
    "two forwards before two backwards": here("forward, forward, backward apart, step, forward", "two", *REGIONS),
    "two backwards through one retained graph": here("forward, backward twice, step, forward", "two", "repeated"),
    "groups were made before": here(AGAIN, "groups 0 and 0 1", "groups 0 1 and 1 2"),
    "groups of some ranks were made before": use(
        f"{AGAIN}, {AGAIN}", "groups 0 1 and 0 3", on=(ZERO3, "hfsdp", "hsdp", "optim")
    ),
    # Slots of a pool, chosen at any time.
    **{
        f"slots {sizing} hold what is gathered": use(
            f"slots {sizing}, {AGAIN}, evaluate no_grad, {AGAIN}, forward, backward no_sync, {AGAIN}, slots none, "
            f"{AGAIN}, slots {other}, {AGAIN}, forward bomb 1 error, zero_grad none, {AGAIN}", "two",
            on=("optim_grads", ZERO3),
        )
        for sizing, other in (("largest", "by_size"), ("by_size", "largest"))
    },
    "slots hold what some ranks use in some steps, after an error in backward": here(
        f"slots by_size, {AGAIN}, forward fuse 1 error, backward, zero_grad none, {AGAIN}, {AGAIN}", "two",
    ),
    "slots hold parts that ranks use or not": here(
        f"slots by_size, {', '.join([STEP] * 4)}", "blocks sometimes", optimizer="adam"
    ),
    # Optimizer steps that are undone by loading an earlier state.
    **{
        f"{optimizer} is wound back": use(
            f"save, {AGAIN}, restore, {AGAIN}, save, {AGAIN}, restore, {AGAIN}", "two", optimizer=optimizer
        )
        for optimizer in ("adam", "flat adamw")
    },
    "a sum under way is wound back": use(f"save, forward, backward no_sync, restore, {AGAIN}", "two"),
    "what is gathered is wound back": here(f"{AGAIN}, save, {AGAIN}, restore, {AGAIN}", keeps_weights=True),
    # Dtypes.
    "parts in other dtypes": here(
        f"{STEP.replace('none', 'zero')}, {AGAIN}", "float64 ", "float64 first", "bfloat16 all", "float16 all"
    ),
    **{
        policy: use(
            f"forward, backward no_sync, {STEP}, {AGAIN}", "two", policy=policy, optimizer="adam", is_adapted=True
        )
        for policy in ("fp64 main weights", "fp64 gradients")
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A program of a use and its expected outcome; ``is_slow`` leaves it to the nightly tests."""

    program: Program
    outcome: str
    is_slow: bool = False


def _cases() -> Iterator[tuple[str, Case]]:
    """Yield every use of every model: `make test` runs ZeRO-3 with one way to accumulate, and a third with another
    strategy.

    `make test` runs every second use of recomputed regions, so that each kind meets each use, reentrant or not.
    """
    for row, (name, one) in enumerate(USES.items()):
        actions = ", ".join(MICROBATCHES.get(action, action) for action in one.actions.split(", "))
        for number, model in enumerate(one.models):
            for column, strategy in enumerate(one.strategies):
                for place, how in enumerate(HOWS if "*" in actions else ("",)):
                    other = (row + number) // 3 % len(one.strategies) if (row + number) % 3 == 1 else 0
                    is_slow = (
                        column not in (0, other)
                        or place != (row + column) % 3 * bool(how)
                        or (model in REGIONS and (REGIONS.index(model) + row) % 2 == 1)
                    )
                    options = {"policy": HOWS.get(how, "none"), **one.options}
                    program = MODELS[model].program(actions.replace("*", how), strategy, **options)
                    words = (strategy, *([model] if len(one.models) > 1 else []), *filter(None, [how]))
                    yield f"{name} ({', '.join(words)})", Case(program, one.outcome, is_slow)


def _side_outputs() -> Iterator[tuple[str, Case]]:
    for number, kind in enumerate(SIDE_KINDS):
        for size, results in enumerate(("both results", "the second result", "the first result in a unit")):
            side = Part(kind, (LINEAR, Part("linear", size=2)), size)
            units = ("parts.0.both" if size < 2 else "parts.0", "parts.1", "")
            model = Model((side, Part("linear", size=2)), units, {"is_guarded": size == 0}, (None, True, None)[size])
            case = Case(model.program(f"{STEP}, {AGAIN}", ZERO3), "same", is_slow=(number + size) % 3 == 2)
            yield f"results by {kind}, {results} used", case


CASES: Mapping[str, Case] = dict([*_side_outputs(), *_cases()])
