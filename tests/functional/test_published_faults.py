"""Each of thirteen published faults is found: by the check of gradient scales, or by comparing with one process."""

import re

from tests.functional.published_faults import GRADIENT_FAULTS, STEP_FAULTS, gradient_complaint, step_differences
from tests.harness import on_ranks


@on_ranks(4, timeout=120)
def test_the_check_names_parameter_and_factor_of_every_fault_of_gradients() -> None:
    complaints = {name: gradient_complaint(name) for name in GRADIENT_FAULTS}
    for name, (_, _, _, words) in GRADIENT_FAULTS.items():
        assert re.search(words, complaints[name], re.DOTALL), (name, complaints[name])
        assert bool(complaints[name]) == bool(words), (name, complaints[name])
        if "experts" in name or "groups of one" in name:
            assert "layers.0" not in complaints[name], "dense weights are right"


# The others change gradients as well.
STEPS_ALONE = {"lr / world size", "step counter advanced", "norm times sqrt(dp)", "SGD for Muon"}


@on_ranks(2, timeout=120)
def test_every_fault_before_gradients_or_in_the_step_differs_from_one_process() -> None:
    found = {name: step_differences(name) for name in STEP_FAULTS}
    for name, (of_gradients, of_changes) in found.items():
        if name.startswith("none"):
            assert of_gradients < 1e-6, name
            assert of_changes < 1e-4, name
        else:
            assert of_changes > 0.05, (name, of_changes)
            assert (of_gradients < 1e-6) == (name in STEPS_ALONE), (name, of_gradients)


def test_there_are_thirteen() -> None:
    faults = [name for name in (*GRADIENT_FAULTS, *STEP_FAULTS) if not name.startswith("none")]
    assert len(set(faults)) == 13
