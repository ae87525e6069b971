"""Import the modules that most tests need, once, in the process from which ranks are forked.

``import megatron_fsdp`` alone loads no engine; names of its are what loads it.
"""

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.testing  # noqa: F401

import dbuffer
import megatron_fsdp
import tests.harness.oracle
import tests.harness.worker  # noqa: F401
from megatron_fsdp.engine import fused_linear as fuse

# Set as in ``tests/conftest.py``.
fuse.MIN_NUMEL = 0

PACKAGES = (dbuffer, megatron_fsdp)

LOADED = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
