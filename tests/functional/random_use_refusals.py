"""The closed list of errors by which the engine may refuse what a plain model would do. Nothing else may be raised."""

from tests.functional.random_side_parts import SIDE_KINDS
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
        ("grad none", "freeze", "thaw", "spare", "pick", "sometimes", *SIDE_KINDS),
    ),
    # The gradient of what one rank computes with.
    Refusal("StateError", r"torch.autograd.grad .* was asked for the gradient of", ("autograd",)),
    # Second thoughts on what was sharded.
    Refusal("StateError", r"was frozen when it was sharded, so it has no main weight of", ("thaw",)),
    # Registered in a parameter's place, or beside the parameters, after fully_shard.
    Refusal("StateError", r"was replaced by .* after fully_shard", ("replace", "tie", "functional")),
    Refusal("StateError", r"was taken out of its module", ("replace", "tie")),
    Refusal("StateError", r"was added after fully_shard and requires a gradient", ("add", "tie", "thaw")),
    # Gathered weights that compute or the user changes, or reads after they were released.
    Refusal(
        "StateError",
        r"was changed in place while it was gathered",
        ("clamped", "renormed", "weight", "poke", "load", "replace"),
    ),
    Refusal("CheckpointError", r"was changed in place while it was gathered", ("weight",)),
    Refusal("ConfigError", r"max_norm", ("renormed",)),
    Refusal(
        "StorageError", r"of its gathered weight, which was released", ("weight", "poke", "stash", "unshard", "load")
    ),
    # Hooks that autograd would never call.
    Refusal("PlacementError", r"register_hook on a sharded parameter would never be called", ("hook",)),
    # Sums under way, and those that a backward left incomplete.
    Refusal(
        "StateError",
        r"is a sum under way, not reduced over all ranks yet",
        ("backward flag", "backward no_sync", "backward microbatch"),
    ),
    Refusal(
        "StateError",
        r"was dropped or replaced while its sum is under way",
        ("backward flag", "backward no_sync", "backward microbatch"),
    ),
    # Weights of a new step are gathered, and nobody has said what becomes of the sums before it.
    Refusal("StateError", r"clip_grad_norm_ before gradients are final", ("drop",)),
    Refusal("StateError", r"is incomplete, because the last backward raised", ("forward error", "forward interrupt")),
)
