"""The closed list of errors by which the engine may refuse what a plain model would do. Nothing else may be raised."""

from tests.functional.random_use_run import Refusal

__all__ = ["REFUSALS"]

REFUSALS = (
    # At fully_shard.
    Refusal("OwnershipError", r"is the same tensor as '.*' of unit '.*', which owns it already", ("tie",)),
    # A plain tensor of unknown origin beside a sharded one.
    Refusal("PlacementError", r"found a plain tensor of shape .* beside a sharded one", ("borrowing",)),
    # Copies.
    Refusal("StateError", r"cannot be deep-copied: its parameters are views of buffers", ("copy",)),
    # The flat optimizer steps a unit's parameters together.
    Refusal(
        "StateError",
        r"has no gradient, but others have that share a flat parameter with it",
        ("grad none", "freeze", "thaw"),
    ),
    # Second thoughts on what was sharded.
    Refusal("StateError", r"was frozen when it was sharded, so it has no main weight of", ("thaw",)),
)
