"""Features that a variable of the environment leaves out."""

import os
import subprocess
import sys

import pytest

from dbuffer_kernels import switches

IN_USE = """
import torch
import torch.distributed as dist
from torch import nn
from dbuffer_kernels import backend
from dbuffer_kernels.launch import _triton_is_installed
from megatron_fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(nn.Linear(7, 7))
model.set_slot_pool("largest")
(group,) = model.parameter_groups
axis = group.main_weight.axes[0]
print(_triton_is_installed(), axis.reduce_group is axis.gather_group, group.spec.fuses_weight_gradients is False,
      not group.gathered.storage.takes_slots)
"""


def seen(without: str) -> list[str]:
    environment = os.environ | {"DBUFFER_WITHOUT": without, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", IN_USE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_what_is_named_is_left_out_and_nothing_else() -> None:
    plain = seen("")
    assert plain[1:] == ["False", "False", "False"]
    assert seen("triton, separate-reduce,fused-gradients,slots") == ["False", "True", "True", "True"]


def test_a_word_that_names_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUFFER_WITHOUT", "tritn")
    switches._named.cache_clear()
    try:
        with pytest.raises(ValueError, match="tritn; there are triton"):
            switches.is_off("triton")
    finally:
        switches._named.cache_clear()
