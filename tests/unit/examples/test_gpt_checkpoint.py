"""Names of checkpoints, the tracker file and what a resumed run continues from."""

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from gpt.checkpoint import TRACKER, TrainingState, check_tracker, checkpoints_in, differences, resume_folder
from gpt.model import GptConfig
from megatron_fsdp import ConfigError

CONFIG = GptConfig(num_layers=2, hidden_size=24, num_attention_heads=3, ffn_hidden_size=96, max_position_embeddings=8)


def args(**given: Path | None) -> argparse.Namespace:
    return argparse.Namespace(**{"save": None, "load": None, **given})


def test_a_checkpoint_folder_is_named_as_megatron_names_it() -> None:
    assert checkpoints_in(Path("runs")).path(200) == Path("runs/iter_0000200")


def test_the_tracker_holds_the_number_of_the_iteration(tmp_path: Path) -> None:
    checkpoints_in(tmp_path).mark_latest(5)
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]
    assert (tmp_path / TRACKER).read_text() == "5\n"


def test_a_tracker_that_names_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpoints_in(tmp_path).mark_latest(5)
    with pytest.raises(
        ConfigError, match=r"names iteration 5, but there is no whole checkpoint in .*; bring iter_0000005"
    ):
        check_tracker(checkpoints_in(tmp_path))


def test_a_folder_without_a_tracker_is_none(tmp_path: Path) -> None:
    check_tracker(checkpoints_in(tmp_path / "missing"))


def test_a_tracker_without_a_number_is_an_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("release\n")
    with pytest.raises(ConfigError, match="holds 'release'; wanted the number of a step"):
        check_tracker(checkpoints_in(tmp_path))


def test_a_run_resumes_from_where_it_is_told_to(tmp_path: Path) -> None:
    assert resume_folder(args(save=tmp_path, load=None)) is None
    assert resume_folder(args(save=tmp_path, load=tmp_path / "other")) == tmp_path / "other"


def test_a_run_that_torchrun_has_restarted_resumes_from_its_own_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resume_folder(args(save=tmp_path)) == tmp_path
    assert resume_folder(args(save=tmp_path, load=tmp_path / "other")) == tmp_path / "other"


def test_the_state_comes_back_from_json_as_it_was(tmp_path: Path) -> None:
    state = TrainingState(iteration=7, consumed_samples=84, loss_sum=0.1 + 0.2, loss_count=3)
    extra = json.loads(json.dumps(state.to_extra(CONFIG, {"seed": 1})))
    assert TrainingState.from_extra(extra, CONFIG, tmp_path) == state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 4}, "--num-attention-heads is 4, the checkpoint has 3"),
        (
            {"untie_embeddings_and_output_weights": True},
            "--untie-embeddings-and-output-weights is True, the checkpoint has False",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_flags_that_differ(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    extra = TrainingState().to_extra(CONFIG, {})
    with pytest.raises(ConfigError, match=message):
        TrainingState.from_extra(extra, dataclasses.replace(CONFIG, **changes), tmp_path)  # type: ignore[arg-type]


def test_another_initial_deviation_does_not_make_another_model(tmp_path: Path) -> None:
    extra = TrainingState(iteration=3).to_extra(CONFIG, {})
    other = dataclasses.replace(CONFIG, init_method_std=0.5)
    assert TrainingState.from_extra(extra, other, tmp_path).iteration == 3


def test_a_step_counts_one_iteration_and_its_samples() -> None:
    assert TrainingState(4, 48).after_step(12) == TrainingState(5, 60)


def test_only_flags_that_differ_are_listed() -> None:
    saved = {"seed": 1, "seq_length": 8}
    assert differences(saved, {"seed": 1, "seq_length": 9}) == ["--seq-length is 9, the checkpoint has 8"]
