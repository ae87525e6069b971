"""Scenes: the names and files that a page's blocks assume, shortened commands, and blocks that cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.docs.blocks import Block

_MODEL = """\
import torch
from torch import nn
from megatron_fsdp import fully_shard

class TransformerLayer(nn.Linear):
    def __init__(self): super().__init__(8, 8)

model = nn.Sequential(TransformerLayer(), nn.Tanh(), TransformerLayer())
batch, batches = torch.randn(4, 8), torch.randn(3, 4, 8)
loss_of = loss_fn = lambda model, batch: model(batch).square().mean()
"""
_SHARDED = (
    _MODEL
    + """\
fully_shard(model[0]), fully_shard(model[2]), fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = lambda output: output.square().mean()
"""
)
_WHOLE = (
    _MODEL
    + """\
from torch.distributed.device_mesh import init_device_mesh
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_outer", "dp_shard"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
)
_CONFIG = """\
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
 "tie_word_embeddings": false}
"""
_FACTORY = """\
from torch import nn

class Block(nn.Linear):
    def __init__(self): super().__init__(64, 64)

def build():
    return nn.Sequential(nn.Embedding(100, 64), *(Block() for _ in range(4)))
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """How the blocks of one page run.

    Attributes:
        given: Python code before the page's first Python block.
        files: files that its commands read: content by name.
        shorter: pairs of words in its blocks and the words to run instead, to save time.
        elsewhere: pairs of words that mark a block that cannot run here, and the reason.
    """

    given: str = ""
    files: dict[str, str] = field(default_factory=dict)
    shorter: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[tuple[str, str], ...] = ()


SCENES = {
    "README.md": Scene(
        shorter=(
            # 600 iterations take minutes, and CI already runs `make test` as a separate command.
            ("make train ", "make train TRAIN_ITERS=60 "),
            ("make test ", "make --dry-run test "),
            ("pip install . ", "pip install --no-deps --no-build-isolation --target runs/installed . "),
            ("pip wheel --no-deps", "pip wheel --no-deps --no-build-isolation"),
        )
    ),
    "docs/compatibility.md": Scene(given=_WHOLE),
    "docs/gradient_scale.md": Scene(given=_SHARDED),
    "docs/huggingface.md": Scene(
        # test_accelerate.py runs the block that makes a Trainer.
        elsewhere=(
            (
                "with accelerate_fsdp2():",
                "accelerate shards on GPUs only; test_accelerate.py tells it that a CPU is one",
            ),
        )
    ),
    "docs/launch.md": Scene(
        # The second command needs two machines.
        shorter=(("--nproc-per-node 8 train.py", "--nproc-per-node 2 train.py"), ("torchrun --nnodes 2 ", "true ")),
        elsewhere=(
            ("#SBATCH", "it needs SLURM"),
            ("mpirun -np 16", "it needs mpirun and two machines"),
        ),
    ),
    "docs/megatron.md": Scene(elsewhere=(("cd ~/Megatron-LM", "it needs a checkout of Megatron-LM"),)),
    "docs/muon.md": Scene(
        shorter=(("--train-iters 600", "--train-iters 50"), ("AdamW=runs/gpt ", "AdamW=runs/gpt-muon "))
    ),
    "docs/planning.md": Scene(files={"config.json": _CONFIG, "mymodel.py": _FACTORY}),
    "docs/ranks_that_differ.md": Scene(
        given=_MODEL + "import megatron_fsdp\nmodel.blocks = [model[0], model[2]]\n",
    ),
    "docs/reliability.md": Scene(given=_SHARDED),
    "docs/timeline.md": Scene(given=_SHARDED),
    "docs/weights_to_inference.md": Scene(given=_SHARDED),
    "docs/training_script.md": Scene(
        shorter=(
            ("--train-iters 300", "--train-iters 25"),
            ("2e-3 --check-gradient-scale", "2e-3 --check-gradient-scale --train-iters 8 --eval-iters 5"),
        ),
        elsewhere=(("--data-path 0.3 data/code", "it needs megatron-core"),),
    ),
}


def reason_against(block: Block) -> str:
    """Return the reason why a block cannot run here; "" if it can."""
    scene = SCENES.get(block.page, Scene())
    return next((reason for words, reason in scene.elsewhere if words in block.code), "")


def shortened(block: Block) -> str:
    """Return the code of a block with the page's shorter commands."""
    code = block.code
    for words, instead in SCENES.get(block.page, Scene()).shorter:
        code = code.replace(words, instead)
    return code
