"""Sharded training equals replicated training for models, ways to shard and ways to train that are drawn at random.

Twenty examples, the same in every run. ``HYPOTHESIS_PROFILE=nightly`` draws two hundred new ones.
"""

import os
from collections.abc import Iterator, Sequence

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from tests.functional.random_models import COMPOSITES, POLICIES, SHAPES, Part, Wrap, parts_with_paths
from tests.functional.random_training import NUM_RANKS, Example, differences
from tests.harness import run_ranks

NIGHTLY = hypothesis.settings(derandomize=False, max_examples=200)
USUAL = hypothesis.settings(max_examples=20)


def _drawn_dtype(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a dtype and what is frozen: weights of less precision than fp32 are, so that rounding does not matter."""
    return draw(
        st.sampled_from(
            [("float32", "")] * 6
            + [("float32", "first"), ("float32", "all"), ("float64", ""), ("float64", "first"), ("bfloat16", "all")]
            + [("float16", "all")]
        )
    )


@st.composite
def leaves(draw: st.DrawFn) -> Part:
    others = [kind for kind in SHAPES if kind not in ("linear", "scalar")]
    kind = draw(st.sampled_from(["linear"] * 4 + others * 2 + ["scalar"]))
    dtype, frozen = _drawn_dtype(draw)
    size = draw(st.integers(1, 7))
    is_ignored = draw(st.integers(0, 9)) == 9
    return Part(kind, (), size, dtype, frozen, draw(st.integers(0, 7)) == 7, is_ignored)


@st.composite
def parts(draw: st.DrawFn, depth: int, is_by_turn: bool = False) -> Part:
    if not depth or draw(st.integers(0, 2)) == 0:
        if not is_by_turn and draw(st.integers(0, 9)) == 9:
            return Part("again", size=draw(st.integers(0, 9)))
        return draw(leaves())
    kind, size = draw(st.sampled_from(list(COMPOSITES))), draw(st.integers(1, 3))
    inside = is_by_turn or kind == "by turn" or (kind == "pick" and size == 2)
    below = draw(st.lists(parts(depth - 1, inside), min_size=1, max_size=3))
    return Part(kind, tuple(below), size, is_replicated=draw(st.integers(0, 19)) == 19)


def _wrappable(part: Part, path: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the paths of modules that all ranks call, siblings together, children first."""
    if part.kind == "by turn" or (part.kind == "pick" and part.size == 2):
        return
    inner = ".".join([*filter(None, [path]), *(["both"] if part.kind == "pick" else [])])
    paths = [".".join([*filter(None, [inner]), "parts", str(number)]) for number in range(len(part.parts))]
    for below, below_path in zip(part.parts, paths, strict=True):
        yield from _wrappable(below, below_path)
    yield tuple(path for path, below in zip(paths, part.parts, strict=True) if below.kind != "again")
    if part.kind == "pick":
        yield (inner,)


@st.composite
def wraps(draw: st.DrawFn, part: Part, mesh: tuple[int, ...], policies: Sequence[str]) -> tuple[Wrap, ...]:
    """Draw which modules become units, alone or as lists, and their options."""
    one = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    strategies = one if len(mesh) == 1 else ["hsdp", "hfsdp"]
    usual = draw(st.sampled_from(strategies))
    result = []
    has_aliases = any(below.kind == "again" for _, below in parts_with_paths(part))
    # Reductions follow the order of gradients, which is not the same on every rank where units enclose others and ranks
    # use different parameters; and a rank that uses no sharded parameter at all reduces nothing.
    by_turns = any(below.kind in ("by turn", "pick") for _, below in parts_with_paths(part))
    for siblings in [*([] if by_turns else _wrappable(part)), ("",)]:
        chosen = [path for path in siblings if draw(st.integers(0, 2 if path else 5)) or by_turns]
        as_list = len(chosen) > 1 and not has_aliases and draw(st.integers(0, 2)) == 0
        for paths in [tuple(chosen)] if as_list else [(path,) for path in chosen]:
            strategy = usual if draw(st.integers(0, 3)) else draw(st.sampled_from(strategies))
            result.append(
                Wrap(
                    paths,
                    strategy,
                    draw(st.sampled_from([None, None, True, False, 1, mesh[-1]])),
                    draw(st.sampled_from(policies)),
                    draw(st.sampled_from(["slices", "slices", "whole", "whole matrices"])),
                    strategy in ("optim_grads_params", "hsdp", "hfsdp") and draw(st.integers(0, 4)) == 4,
                )
            )
    return tuple(result)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    below = draw(st.lists(parts(2), min_size=1, max_size=4))
    part = Part("gated", tuple(below), draw(st.integers(1, 3)))
    mesh = draw(st.sampled_from([(2,), (2,), (2,), (1, 2), (2, 1)]))
    is_thawing, is_adapted = draw(st.booleans()), draw(st.booleans())
    # Unfrozen weights need main weights of the policy's dtype, and stock optimizers gradients of the weights'.
    left_out = {"fp64 main weights"} if is_thawing else set()
    left_out |= set() if is_adapted else {"fp64 gradients"}
    policies = ["none"] * 4 + [name for name in POLICIES if name not in left_out]
    linear = [(path, one) for path, one in parts_with_paths(part) if one.kind == "linear"]
    alike = [
        (a, b)
        for a, one in linear
        for b, other in linear
        if a < b and (one.size, one.dtype) == (other.size, other.dtype)
    ]
    ties = draw(st.lists(st.sampled_from(alike), max_size=1)) if alike and draw(st.booleans()) else []
    chosen = draw(wraps(part, mesh, policies))
    # Regions that run again reentrantly accumulate each of their gradients once per forward, the others' once in all.
    is_reentrant = any(one.kind == "checkpoint" and one.size % 2 for _, one in parts_with_paths(part))
    # The norm is taken in fp32, which PyTorch does not do to fp64 gradients.
    has_fp64 = any(one.dtype == "float64" for _, one in parts_with_paths(part))
    has_fp64 |= any("fp64" in wrap.policy for wrap in chosen)
    return Example(
        part,
        chosen,
        tuple(ties),
        mesh,
        draw(st.sampled_from(["SGD", "AdamW"])),
        is_adapted,
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["", "microbatch", "no_sync", "flag"])),
        draw(st.sampled_from(["none", "none", "zero", ""])),
        draw(st.sampled_from(["", "ours"])) if not has_fp64 else "",
        draw(st.sampled_from(["", "no_grad", "inference", "eval"])),
        draw(st.sampled_from([1, 1, 2])) if not is_reentrant else 1,
        is_thawing,
        draw(st.integers(0, 4)) == 4,
    )


def check(example: Example) -> None:
    """Train an example on two ranks; fail with what differs, and with the example in a form to paste."""
    found = run_ranks(NUM_RANKS, differences, example, timeout=20)
    assert found == [[]] * NUM_RANKS, f"{found[0][:5]}\ncheck({example!r})"


@(NIGHTLY if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else USUAL)
@given(examples())
def test_a_random_model_sharded_in_a_random_way_trains_like_the_replicated_one(example: Example) -> None:
    check(example)
