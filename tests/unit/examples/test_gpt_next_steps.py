"""What a run says at its end: files that are there, and commands that run."""

import shlex
from pathlib import Path

import pytest

import generate_gpt
import pretrain_gpt
from megatron_fsdp.__main__ import main

RUN = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 3 "
    "--lr 0.01 --eval-iters 0 --distributed-backend gloo --data-path text --num-tokens-to-generate 0"
)

pytestmark = pytest.mark.usefixtures("plain_start")


def said_at_the_end(flags: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Train, and return what each of the last lines says, by its first word or two."""
    assert pretrain_gpt.main([*RUN.split(), *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = lines[next(index for index, line in enumerate(lines) if line.startswith("loss curve")) :]
    return {line.strip().partition("  ")[0]: line.strip().partition("  ")[2].strip() for line in last}


def test_the_three_commands_go_on_from_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    said = said_at_the_end("--use-megatron-fsdp --save run", capsys)
    assert all(Path(said[what]).exists() for what in ("loss curve", "log", "checkpoint"))
    generate, resume, export = (shlex.split(said[what]) for what in ("generate", "resume", "export"))
    assert generate_gpt.main([*generate[2:], "--num-tokens-to-generate", "3"]) == 0
    assert capsys.readouterr().out.startswith("def main(")
    assert pretrain_gpt.main(resume[2:]) == 0
    assert "resuming from run/iter_0000003" in capsys.readouterr().out
    assert Path("run/iter_0000006").exists()
    assert main(export[3:]) == 0
    assert list(Path("run/safetensors").glob("*.safetensors"))


def test_a_command_to_resume_twice_names_its_folder_and_length_once(capsys: pytest.CaptureFixture[str]) -> None:
    said_at_the_end("--save run", capsys)
    resume = said_at_the_end("--save run --load run --train-iters=6", capsys)["resume"]
    assert resume.endswith(" --save run --load run --train-iters 12")
    assert resume.count("--load") == resume.count("--train-iters") == 1


def test_a_run_that_was_stopped_resumes_to_the_length_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_at_the_end("--save run --exit-interval 2", capsys)["resume"].endswith("--train-iters 3")


def test_without_a_checkpoint_there_is_the_log_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*said_at_the_end("", capsys)] == ["loss curve", "log"]
