"""Cast, accumulate and pack flat tensors: Triton kernels on CUDA, the same numerics in plain torch everywhere else."""

# The ops are imported here and not on first use: a later import of the submodule `accumulate` or `pack` would rebind
# that name in this package from the function to the module.
from dbuffer_kernels import reference
from dbuffer_kernels.accumulate import accumulate
from dbuffer_kernels.cast import cast_copy
from dbuffer_kernels.launch import backend, use_backend
from dbuffer_kernels.pack import pack

__all__ = ["accumulate", "backend", "cast_copy", "pack", "reference", "use_backend"]
