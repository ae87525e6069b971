"""Errors and warnings of the buffer engine. Every error is a ``ValueError``, because the caller can fix its cause."""


class DBufferError(ValueError):
    """Base class of every error that ``dbuffer`` raises for a caller's mistake.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except DBufferError as error:
            print(error)  # any mistake of the caller that the flat buffers find
    """


class LayoutError(DBufferError):
    """A flat-buffer plan is invalid, impossible, or padded beyond the allowed limit.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except LayoutError as error:
            print(error)  # names the tensors whose rows fit no common shard size
    """


class PlacementError(DBufferError):
    """A placement does not exist, does not fit its mesh, or cannot be redistributed to another.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except PlacementError as error:
            print(error)  # names the tensor and the placements that it can have
    """


class StorageError(DBufferError):
    """Storage was used after its release, released twice, or does not match its plan.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except StorageError as error:
            print(error)  # names the buffer whose memory was released
    """


class MeshError(DBufferError):
    """A device mesh lacks an axis, has the wrong size, or differs from the mesh a buffer was built on.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except MeshError as error:
            print(error)  # names the mesh, its axes, and the requested axis
    """


class ReadError(DBufferError, RuntimeError):
    """Some ranks of the mesh did not call an operator on a sharded tensor, or called it for another tensor.

    Example:
        try:
            norm = next(model.parameters()).norm()  # every rank calls it; `if rank == 0` belongs before the print
        except ReadError as error:
            print(error)  # names the tensor, the ranks, the line of the script and the fix
    """


class PaddingWarning(UserWarning):
    """A plan is valid but wasteful. The message names the tensor that causes the padding, and the fix."""
