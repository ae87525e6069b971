"""The training script with a fault in it: ``python -m tests.faults.faulty_gpt NOTES MOMENT ITERATION RANK FLAGS``."""

import os
import sys
from pathlib import Path

import pretrain_gpt
from tests.faults.injection import Fault, Injector


def main(words: list[str]) -> int:
    """Install the fault ("none" for none) and train."""
    notes, moment, iteration, rank, *flags = words
    fault = None if moment == "none" else Fault(moment, int(iteration), int(rank))
    Injector(fault, Path(notes), int(os.environ.get("RANK", "0"))).install()
    return pretrain_gpt.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
