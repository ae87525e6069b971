"""Leave out files whose package is not installed; `make test-integrations` installs all packages."""

import importlib.util

from tests.integration.engine_files import FOLDER

_NEEDS = {
    "test_transformers*": "transformers",
    "test_accelerate*": "peft",
    "test_peft*": "peft",
    "test_torchtitan*": "torchtitan",
    "test_megatron*": "megatron",
    "test_script*": "megatron",
    "test_torchao*": "torchao",
    "test_trl*": "trl",
    "test_bitsandbytes*": "bitsandbytes",
}

collect_ignore_glob = [files for files, package in _NEEDS.items() if importlib.util.find_spec(package) is None]
if not FOLDER.is_dir():
    collect_ignore_glob.append("test_inference_engines*")
