"""Calls with a sharded tensor and plain tensors that hold this rank's own data, such as activations.

Each rank calls the function with the whole sharded tensor, and gets a plain tensor as the result. Backward
averages the gradients of the sharded tensor over the ranks, as for ``full_tensor()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from dbuffer.dtensor.placed_tensor import PlacedTensor, is_replication_implied, label_of

__all__ = ["OwnData", "own_data_of"]

_WARNED: WeakIdKeyDictionary = WeakIdKeyDictionary()


class OwnData:
    """The operands of one call that hold this rank's own data.

    Args:
        tensors: the plain operands. sharded: the sharded operands.
    """

    def __init__(self, tensors: list[torch.Tensor], sharded: list[PlacedTensor]) -> None:
        self._sharded = sharded
        self._dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}

    def cast(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return ``whole`` in its owner's compute dtype, if this rank's own data have that dtype."""
        named = label_of(tensor)
        if named is None or whole.dtype in self._dtypes or named.compute_dtype not in self._dtypes:
            return whole
        return whole.to(named.compute_dtype)

    def warn(self, function: str) -> None:
        """Warn once per parameter that is trained through such a call, because it is slow."""
        for tensor in self._sharded:
            named = label_of(tensor)
            if named is not None and tensor.requires_grad and tensor not in _WARNED:
                _WARNED[tensor] = True
                warnings.warn(
                    f"{named.words()} was used by {function} outside of its unit's forward, beside this rank's own "
                    "data. The result is right, but each such use gathers this weight alone and keeps the whole of it "
                    f"until backward. fix: {named.fix}",
                    stacklevel=2,
                )


def own_data_of(
    operands: Iterable[torch.Tensor], *, is_in_place: bool, is_element_wise: bool, is_recorded: bool
) -> OwnData | None:
    """Return this rank's own data among the operands; None if all plain operands count as equal on all ranks.

    Plain tensors written into sharded ones are not own data. Neither are plain operands of an element-wise function
    whose result has the shape of a sharded operand: that is arithmetic on weights (a mask, an average), not a use of
    the weights. In that case only a plain tensor that requires grad is own data.

    Args:
        operands: all operands. is_in_place: the call writes to its first operand. is_element_wise: see above.
        is_recorded: autograd records the call.
    """
    tensors = list(operands)
    sharded = [tensor for tensor in tensors if isinstance(tensor, PlacedTensor)]
    if not sharded or len(sharded) == len(tensors) or is_replication_implied():
        return None
    is_into_plain = is_in_place and not isinstance(tensors[0], DTensor)
    if is_in_place and not is_into_plain:
        return None
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    trained = [tensor for tensor in plain if is_recorded and tensor.requires_grad]
    # A single element counts as a factor that is equal on all ranks.
    is_large = [tensor.numel() > 1 or (tensor.ndim > 0 and not is_element_wise) for tensor in plain]
    if not trained and not any(is_large):
        return None
    if is_element_wise and not trained and not is_into_plain:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        if any(tensor.shape == shape for tensor in sharded):
            return None
    return OwnData(plain, sharded)
