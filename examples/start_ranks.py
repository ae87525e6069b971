"""torchrun, without its report of forty lines where a rank has said why it ends; the same arguments.

python examples/start_ranks.py --standalone --nproc-per-node 2 examples/pretrain_gpt.py --help
"""

import logging
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> int:
    """Start the ranks with torchrun's arguments, and return their exit status.

    Raises:
        ChildFailedError: a rank failed without a message; read torchrun's report.
    """
    # In this process alone: what torchrun logs of a rank that fails is in its report as well.
    logging.disable(logging.ERROR)
    try:
        main()
    except SignalException as error:
        # torchrun has forwarded the signal and waited until the ranks have ended.
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if not Path(failure.error_file).exists():
            raise
        return int(failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(run())
