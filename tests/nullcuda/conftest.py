"""Leave these tests out except in the python that ``build.py`` makes."""

import os
from pathlib import Path

collect_ignore_glob = [] if "NULLCUDA" in os.environ else ["test_*"]

# Programs that tests start find the project there: it is not installed in that python.
ROOT = Path(__file__).parents[2]
if "NULLCUDA" in os.environ:
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "examples"))
