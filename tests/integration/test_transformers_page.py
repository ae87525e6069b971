"""The examples in docs/huggingface.md run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from megatron_fsdp import FsdpModule
from tests.integration.ranks import run_ranks
from tests.integration.tiny_models import reset_accelerate

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def examples() -> list[str]:
    """Return the examples that need no GPU, in order."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:3]


def run_examples(folder: str) -> tuple[list[str], str, bool]:
    reset_accelerate()
    names: dict[str, Any] = {}
    for code in examples():
        text = code.replace('"runs/', f'"{folder}/').replace("report_to=[]", "report_to=[], use_cpu=True")
        exec(compile(text, str(PAGE), "exec"), names)  # what is under test is the text
    written = sorted(path.parent.name for path in Path(folder).rglob("*.safetensors"))
    model = names["trainer"].model
    is_sharded = isinstance(model, FsdpModule) and all(isinstance(p, DTensor) for p in model.parameters())
    return written, names["trainer"].args.output_dir, is_sharded


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_examples_train_load_and_save_on_two_ranks(tmp_path: Path) -> None:
    written, output, is_sharded = run_ranks(2, run_examples, str(tmp_path))[0]
    assert written == ["last", "llama", "llama-bf16"]
    assert output == f"{tmp_path}/trainer"
    assert is_sharded
