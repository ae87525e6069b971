"""Errors and warnings of the buffer engine; every error is a ``ValueError``, because the caller can put it right."""


class DBufferError(ValueError):
    """Base of everything ``dbuffer`` raises for a mistake of its caller."""


class LayoutError(DBufferError):
    """A flat-buffer plan is illegal, impossible, or so padded that building it would be a mistake."""


class PlacementError(DBufferError):
    """A placement does not exist, does not fit its mesh, or cannot be redistributed to another."""


class StorageError(DBufferError):
    """Storage was used after its release, released twice, or does not match its plan."""


class MeshError(DBufferError):
    """A device mesh lacks an axis, has the wrong size, or is not the one a buffer was built on."""


class ReadError(DBufferError, RuntimeError):
    """An operator on a sharded tensor that some ranks of the mesh did not call, or called for another tensor."""


class PaddingWarning(UserWarning):
    """A plan is legal and wasteful: the message names the tensor that binds and the cure."""
