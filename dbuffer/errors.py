"""Errors and warnings of the buffer engine; every error is a ``ValueError``, because the caller can put it right."""


class DBufferError(ValueError):
    """Base of everything ``dbuffer`` raises for a mistake of its caller.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except DBufferError as error:
            print(error)  # any mistake of the caller that the flat buffers find
    """


class LayoutError(DBufferError):
    """A flat-buffer plan is illegal, impossible, or so padded that building it would be a mistake.

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
    """A device mesh lacks an axis, has the wrong size, or is not the one a buffer was built on.

    Example:
        try:
            loss = model(torch.randn(2, 16)).square().mean()
        except MeshError as error:
            print(error)  # names the mesh, its axes, and the one that was asked for
    """


class ReadError(DBufferError, RuntimeError):
    """An operator on a sharded tensor that some ranks of the mesh did not call, or called for another tensor.

    Example:
        try:
            norm = next(model.parameters()).norm()  # every rank calls it; `if rank == 0` belongs before the print
        except ReadError as error:
            print(error)  # names the tensor, the ranks, the line of the script and the fix
    """


class PaddingWarning(UserWarning):
    """A plan is legal and wasteful: the message names the tensor that binds and the cure."""
