"""Makes the example's modules importable as the script sees them: from the folder that it lies in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
