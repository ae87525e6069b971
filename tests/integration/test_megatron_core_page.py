"""docs/megatron.md: its code runs as it stands there."""

import re
from pathlib import Path
from typing import Any

from megatron_fsdp.runtime.lifecycle.module import FsdpModule
from tests.integration.megatron_meshes import Mesh, Task, config_of, make_chunk, megatron_processes, run_steps
from tests.integration.ranks import run_ranks
from tests.integration.test_megatron_exchange import written_by_threads

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"


def follow_the_page(folder: Path) -> tuple[bool, list[float]]:
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    with megatron_processes():
        for code in codes:
            exec(compile(code, str(PAGE), "exec"), names)  # what is under test is the text
        config = config_of(Task(), Mesh())
        model, optimizer = names["wrap"](config, make_chunk(Task(), config, None))
        norms = [norm for _, norm in run_steps(Task(), [model], optimizer, range(2))[0]]
        with written_by_threads():
            names["save_torch_dist"]([model], optimizer, folder / "from", {"iteration": 2})
            names["exchange"](model, optimizer, folder / "from", folder / "to")
        assert names["load_torch_dist"]([model], None, folder / "to")["iteration"] == 2
        return isinstance(model.module, FsdpModule), norms


def test_the_documented_function_wraps_a_model_for_megatrons_schedule(tmp_path: Path) -> None:
    for is_sharded, norms in run_ranks(2, follow_the_page, tmp_path):
        assert is_sharded
        assert all(norm > 0.1 for norm in norms)
