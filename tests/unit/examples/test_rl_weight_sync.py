"""The example of weight sync never waits for ever: an error names the weights that do not arrive."""

import pickle
from multiprocessing import Pipe

import pytest

from rl_weight_sync import receive


def test_a_message_that_misses_its_deadline_is_named() -> None:
    ours, theirs = Pipe()
    with pytest.raises(TimeoutError, match=r"the generator's texts did not come within 0 s\. fix: .* --timeout"):
        receive(ours, "the generator's texts", 0.01)
    theirs.send_bytes(pickle.dumps("texts"))
    assert receive(ours, "the generator's texts", 60) == "texts"


def test_the_end_of_the_other_process_is_named() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(RuntimeError, match=r"the trainer.s weights cannot arrive, because the process .* has ended"):
        receive(ours, "the trainer's weights", 60)
