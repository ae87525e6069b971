"""The training script in one process: log, errors, checkpoints and resuming."""

import dataclasses
import json
import math
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import generate_gpt
import pretrain_gpt
from gpt.checkpoint import checkpoints_in
from gpt.model import GptConfig, GptModel
from gpt.throughput import flops_per_token
from megatron_fsdp import FsdpModule, save_checkpoint
from megatron_fsdp.__main__ import main as command
from tests.harness.grids import nightly_but

TINY = (
    "--num-layers 1 --hidden-size 12 --num-attention-heads 2 --seq-length 9 --micro-batch-size 4 --train-iters 6 "
    "--lr 0.01 --log-interval 1 --eval-iters 0 --num-tokens-to-generate 0 --distributed-backend gloo --data-path text"
)
ENGINE = "--use-megatron-fsdp"
MODERN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --disable-bias-linear "
    "--num-experts 2 --moe-aux-loss-coeff 0.1"
)

pytestmark = pytest.mark.usefixtures("plain_start")


def train(flags: str = "", key: str = "lm_loss") -> list[Any]:
    """Run the script with the tiny model and more flags, and return one column of its log."""
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 0
    folder = Path(flags.partition("--save ")[2].split()[0] if "--save " in flags else "runs/gpt")
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def refusal(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script, which has to fail, and return its message."""
    assert pretrain_gpt.main([*TINY.split(), *flags.split()]) == 2
    if dist.is_initialized():
        dist.destroy_process_group()  # a run that fails leaves its process group to the end of the process
    return capsys.readouterr().err


def kept(folder: str = "run") -> list[str]:
    return sorted(path.name for path in Path(folder).glob("iter_???????"))


# ---------------------------------------------------------------------- steps and the log


def test_microbatches_change_neither_losses_nor_gradient_norms() -> None:
    for key in ("lm_loss", "grad_norm", "validation_loss"):
        split = train("--eval-iters 2 --micro-batch-size 1 --global-batch-size 4", key)
        assert split == pytest.approx(train("--eval-iters 2", key), rel=1e-5), key


def test_an_interval_logs_the_mean_of_its_losses() -> None:
    each, mean = train(), train("--log-interval 3 --eval-interval 4 --eval-iters 1")
    assert len(train("--eval-interval 4 --eval-iters 1", "validation_loss")) == 2
    # The first and the last iteration get a line in addition to the multiples.
    assert mean == pytest.approx([each[0], sum(each[1:3]) / 2, sum(each[3:6]) / 3], rel=1e-6)


def test_checksums_are_logged_at_their_interval_and_at_the_end_and_add_up() -> None:
    flags = f"{ENGINE} --log-checksum 4"
    totals, units = train(flags, "checksum"), train(f"{flags} --log-checksum-per-unit", "unit_checksums")
    assert totals[0] != totals[1]
    for total, each in zip(totals, units, strict=True):
        assert {"", "blocks.0"} <= each.keys()
        assert f"{sum(int(number, 16) for number in each.values()) % 2**64:016x}" == total
    assert train(flags, "unit_checksums") == []


def spoil(monkeypatch: pytest.MonkeyPatch, iterations: tuple[int, ...]) -> None:
    """Make the loss NaN in these iterations."""
    step, loss_of = pretrain_gpt.train_step, pretrain_gpt.loss_of

    def bad(job: Any, text: Any) -> Any:
        loss = loss_of(job, text)
        return dataclasses.replace(loss, total=loss.total * float("nan"))

    def train_step(job: Any, state: Any) -> Any:
        is_bad = state.iteration + 1 in iterations
        with mock.patch.object(pretrain_gpt, "loss_of", bad if is_bad else loss_of):
            return step(job, state)

    monkeypatch.setattr(pretrain_gpt, "train_step", train_step)


def test_steps_with_nan_are_left_out_when_asked_and_do_not_count_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    each = train()
    spoil(monkeypatch, (4,))
    losses = train("--log-interval 2 --skip-nonfinite-steps")
    # Lines of iterations 1, 2, 4 and 6: only the third line has the loss of a single step.
    assert losses[:3] == pytest.approx(each[:3], rel=1e-6)
    assert math.isfinite(losses[3])


def test_nan_in_gradients_ends_the_run_and_names_parameter_and_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, (3,))
    said = refusal("--save run --save-interval 1", capsys)
    assert (
        "error: iteration 3: lm loss nan, gradient norm nan: NaN in the gradient of parameter 'embedding.word" in said
    )
    assert "--skip-nonfinite-steps" in said
    assert kept() == ["iter_0000001", "iter_0000002"]


def test_dump_param_to_param_group_map_names_the_group_of_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    train(f"{ENGINE} --dump-param-to-param-group-map maps/groups.json")
    groups = json.loads(Path("maps/groups.json").read_text())
    assert groups["blocks.0.mlp.linear_fc1.weight"] == groups["embedding.word_embeddings.weight"] == 0
    assert groups["blocks.0.mlp.linear_fc1.bias"] == groups["head.final_layernorm.weight"] == 1
    assert len(groups) == 2 + 12 + 2
    flag = "--dump-param-to-param-group-map text/groups.json"
    assert f"{flag}: cannot be written" in refusal(flag, capsys)


@pytest.mark.parametrize(
    ("flags", "num_steps"), [(f"{ENGINE} --profile-step-start 2", 4), ("--profile-step-start 6", 1)]
)
def test_a_profile_is_a_chrome_trace_and_the_exposed_share_is_printed(
    flags: str, num_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"--profile --profile-step-end {6 if ENGINE in flags else 9} {flags} --save run")
    (trace,) = Path("run").glob("trace_rank0_steps*.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#") for name in names) == num_steps
    assert ("exposed communication" in capsys.readouterr().out) == (ENGINE in flags)
    train("--profile --profile-step-start 8 --save other")
    assert not list(Path("other").glob("trace_*"))
    assert "--profile records nothing: this run trains iterations 1 to 6, without --pro" in capsys.readouterr().out


def test_wrong_flags_and_missing_texts_are_one_line_and_start_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal("--hiden-size 3", capsys) == (
        "pretrain_gpt.py: error: unknown option --hiden-size. fix: use --hidden-size, the most similar one\n"
    )
    assert "--data-path: cannot read nowhere" in refusal("--data-path nowhere", capsys)
    assert not Path("runs").exists()


# ---------------------------------------------------------------------- checkpoints, signals, going on


@pytest.mark.parametrize("flags", nightly_but([f"{ENGINE} --async-save"], ["", ENGINE, f"{ENGINE} --async-save"]))
def test_a_run_in_two_parts_has_the_losses_of_one(flags: str) -> None:
    wanted = train(f"{flags} --save run --log-interval 2")
    shutil.rmtree("run")
    train(f"{flags} --save run --log-interval 2 --exit-interval 3")
    assert train(f"{flags} --save run --log-interval 2 --load run") == wanted
    shutil.rmtree("run")
    train(f"{flags} --save run --log-interval 2 --save-interval 1 --keep-last 2 --exit-interval 3")
    assert kept() == ["iter_0000002", "iter_0000003"]
    assert Path("run/latest_checkpointed_iteration.txt").read_text() == "3\n"
    with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT="1"):
        assert train(f"{flags} --save run --log-interval 2") == wanted, "a restart by torchrun is not told to resume"


def test_a_restart_by_torchrun_resumes_from_save_when_it_is_ahead_of_load(capsys: pytest.CaptureFixture[str]) -> None:
    train(f"{ENGINE} --save first --exit-interval 2")
    flags = f"{ENGINE} --load first --save second"
    wanted = train(flags)
    shutil.rmtree("second")
    with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT="1"):
        train(f"{flags} --exit-interval 4")
        assert "resuming from first/iter_0000002" in capsys.readouterr().out
        assert train(f"{flags} --no-load-optim") == wanted, "the second folder has the optimizer's state"
    assert "resuming from second/iter_0000004" in capsys.readouterr().out


def damage(checkpoint: str) -> None:
    file = Path(checkpoint, "__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = train("--save run --save-interval 2")
    damage("run/iter_0000006")
    assert train("--save run --load run") == wanted
    printed = capsys.readouterr().out
    assert "passed over a checkpoint: run/iter_0000006 is damaged" in printed
    assert "resuming from run/iter_0000004: 4 iterations, 16 samples" in printed


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    number: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = train("--save run")
    shutil.rmtree("run")
    step = pretrain_gpt.train_step

    def send_in_third(job: Any, state: Any) -> Any:
        if state.iteration == 2:
            signal.raise_signal(number)
        return step(job, state)

    with mock.patch.object(pretrain_gpt, "train_step", send_in_third):
        assert train("--save run --async-save") == wanted[:3]
    assert f"stopped by {name} after 3 iterations" in capsys.readouterr().out
    assert kept() == ["iter_0000003"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert train("--save run --load run") == wanted


def test_a_save_in_the_background_that_fails_ends_the_run_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch("megatron_fsdp.checkpoint.writer.sync", side_effect=full):
        assert "No space left on device" in refusal(f"{ENGINE} --save run --async-save --save-interval 2", capsys)


def test_another_models_checkpoint_is_refused_or_loaded_where_it_matches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = train(ENGINE)
    assert train(f"{ENGINE} --save run --exit-interval 3") == wanted[:3]
    heads = refusal(f"{ENGINE} --save run --load run --num-attention-heads 3", capsys)
    assert "run/iter_0000003 holds another model: --num-attention-heads is 3, the checkpoint has 2" in heads
    other = f"{ENGINE} --save other --load run --num-layers 2 --ffn-hidden-size 40"
    assert "blocks.1.mlp.linear_fc1.weight: not in the checkpoint" in refusal(other, capsys)
    train(f"{other} --no-strict-fsdp-dtensor-load")
    printed = capsys.readouterr().out
    assert "run/iter_0000003 is of another model: 13 tensors loaded, 15 left as they are" in printed
    assert "blocks.0.mlp.linear_fc1.weight: (48, 12) in the checkpoint, (40, 12) here" in printed
    assert " iteration        4/       6" in printed
    flags = "--load run --no-strict-fsdp-dtensor-load --init-method-std 0.5"
    assert train(f"{ENGINE} --save run {flags}") == wanted, "of the same model it is loaded whole"


def test_an_empty_load_folder_is_refused_unless_it_is_the_save_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("here").mkdir()
    for folder, found in (("elsewhere", "there is no such folder"), ("here", "there is no checkpoint in it")):
        said = refusal(f"--load {folder} --save run", capsys)
        assert f"--load {folder}: {found}. fix: give the --save folder of an earlier run" in said
        assert not kept()
    assert train("--load ./run --save run") == train()


def test_a_run_that_is_over_says_so_and_the_command_to_resume_goes_further(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = train("--save run")
    assert train("--save run --load run --train-iters 4") == wanted[:6]
    printed = capsys.readouterr().out
    assert "nothing is left to train: 6 iterations are done, and the run has 4" in printed
    assert "--load run --train-iters 12" in printed


def test_a_run_goes_on_from_its_own_checkpoint_beside_later_ones_of_another_run() -> None:
    train("--save run")
    wanted = train("--save whole --seed 7")
    assert train("--save run --seed 7 --exit-interval 2") == wanted[:2]
    assert train("--save run --seed 7 --load run") == wanted


def test_a_length_in_samples_is_refused_for_another_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    flags = TINY.replace("--train-iters 6", "--train-samples 48 --global-batch-size 8 --save run")
    assert pretrain_gpt.main([*flags.split(), "--exit-interval", "3"]) == 0
    assert pretrain_gpt.main([*flags.split(), "--load", "run", "--global-batch-size", "4"]) == 2
    dist.destroy_process_group()
    said = capsys.readouterr().err
    assert "the 3 iterations in run took 24 samples" in said
    assert "fix: --global-batch-size 8, or give the length as --train-iters" in said
    assert pretrain_gpt.main([*flags.split(), "--load", "run"]) == 0


def test_a_checkpoint_of_another_script_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    model = GptModel(GptConfig(1, 12, 2, 48, 9, vocab_size=256))
    checkpoints_in(Path("foreign")).save(model, None, 3, extra={"training": {}})
    said = refusal("--load foreign --no-load-optim", capsys)
    assert "foreign/iter_0000003 was not saved by pretrain_gpt.py: its extra has no model, data. fix: " in said


# ---------------------------------------------------------------------- afterwards


@pytest.mark.parametrize("flags", [ENGINE, f"{ENGINE} {MODERN}"])
def test_the_three_commands_at_the_end_go_on_from_the_run(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(f"{flags} --save run --num-tokens-to-generate 5 --prompt def")
    lines = capsys.readouterr().out.splitlines()
    last = lines[next(index for index, line in enumerate(lines) if line.startswith("loss curve")) :]
    said = {line.strip().partition("  ")[0]: line.strip().partition("  ")[2].strip() for line in last}
    assert all(Path(said[what]).exists() for what in ("loss curve", "log", "checkpoint"))
    generate, resume, export = (shlex.split(said[what]) for what in ("generate", "resume", "export"))
    assert generate_gpt.main([*generate[2:], "--num-tokens-to-generate", "3"]) == 0
    assert capsys.readouterr().out.startswith("def main(")
    # The sample at the end of the run is equal.
    for folder in ("run", "run/iter_0000006"):
        assert generate_gpt.main(["--load", folder, "--prompt", "def", "--num-tokens-to-generate", "5"]) == 0
        sample = capsys.readouterr().out
        assert f" sample at temperature 0.7:\n{sample}" in "\n".join(lines)
    assert pretrain_gpt.main(resume[2:]) == 0
    printed = capsys.readouterr().out
    assert "resuming from run/iter_0000006" in printed
    assert printed.count("--load run --train-iters 24") == printed.count("--load") - 1 == 1
    assert Path("run/iter_0000012").exists()
    assert command(export[3:]) == 0
    assert list(Path("run/safetensors").glob("*.safetensors"))


def test_generate_names_a_checkpoint_that_it_cannot_load(capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(torch.nn.Linear(2, 2), None, "other")
    train("--save run")
    damage("run/iter_0000006")
    for folder, said in (
        ("nowhere", "no whole checkpoint in nowhere"),
        ("other", "does not describe its model"),
        ("run", "dam"),
    ):
        assert generate_gpt.main(["--load", folder]) == 2
        assert said in capsys.readouterr().err


# ---------------------------------------------------------------------- one process that stands for many


@pytest.mark.parametrize(("flags", "num_shards"), [("", 16), ("--num-distributed-optimizer-instances 4", 4)])
def test_fake_process_group_shards_for_more_ranks_than_processes(
    flags: str, num_shards: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    step, found = pretrain_gpt.train_step, []

    def look(job: Any, state: Any) -> Any:
        parameters: list[Any] = list(job.model.parameters())
        assert isinstance(job.model, FsdpModule)
        found.append(sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters))
        return step(job, state)

    with mock.patch.object(pretrain_gpt, "train_step", look):
        train(f"{ENGINE} --fake-process-group --hidden-size 64 {flags}")
    assert found == [pytest.approx(1 / num_shards, rel=0.1)] * 6
    assert "one process stands for 16 ranks (--fake-process-group): losses mean nothing" in capsys.readouterr().out
    assert not dist.is_initialized()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "--fake-process-group is for one process" in refusal(f"{ENGINE} --fake-process-group", capsys)


# ---------------------------------------------------------------------- flags of Megatron's that are cheap to have


def test_dropout_changes_training_and_not_validation_and_a_resume_drops_the_same() -> None:
    flags = "--eval-interval 9 --eval-iters 1 --hidden-dropout 0.2 --attention-dropout 0.2 --save"
    whole, plain = train(f"{flags} whole"), train()
    assert whole != plain
    assert train(f"{flags} parts --exit-interval 3") == whole[:3]
    assert train(f"{flags} parts --load parts") == whole
    rate = "--lr 1e-30 --min-lr 0 --weight-decay 0 --eval-iters 1 --save"
    with_dropout = train(f"--hidden-dropout 0.9 {rate} one", "validation_loss")
    assert with_dropout == train(f"{rate} two", "validation_loss")


def test_workers_read_the_samples_that_the_step_would_read() -> None:
    assert train("--num-workers 2 --global-batch-size 8") == train("--global-batch-size 8")


def test_mock_data_is_random_bytes_of_the_seed() -> None:
    flags = TINY.replace("--data-path text", "--mock-data")
    losses = []
    for seed in (1, 1, 2):
        assert pretrain_gpt.main([*flags.split(), "--seed", str(seed)]) == 0
        rows = Path("runs/gpt/log.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["lm_loss"] for row in rows])
    assert losses[0] == losses[1] != losses[2]
    assert min(losses[0]) > 5.0, "nothing to learn"


@pytest.mark.parametrize("engine", ["", ENGINE])
def test_finetune_takes_weights_and_starts_at_iteration_0(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(f"{engine} --save run")
    tuned = train(f"{engine} --save tuned --load run --finetune", "iteration")
    assert tuned == [1, 2, 3, 4, 5, 6]
    assert "--finetune: weights alone were taken" in capsys.readouterr().out
    assert train(f"{engine} --save tuned --load run --finetune")[0] < first[0]
    with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT="1"):
        more = train(f"{engine} --save tuned --load run --finetune --train-iters 7", "iteration")
    assert more == [1, 2, 3, 4, 5, 6, 7]
    assert "resuming from tuned/iter_0000006" in capsys.readouterr().out


def test_no_save_optim_leaves_the_state_out_and_no_load_optim_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    train(f"{ENGINE} --save run --no-save-optim")
    assert "--no-load-optim" in capsys.readouterr().out, "in the command that resumes"
    assert "optimizer" in refusal_of_load(f"{ENGINE} --save run --load run --train-iters 8", capsys)
    assert train(f"{ENGINE} --save run --load run --train-iters 8 --no-load-optim", "iteration")[-2:] == [7, 8]


def refusal_of_load(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    return refusal(flags, capsys)


def test_log_throughput_counts_the_products_that_a_step_computes(capsys: pytest.CaptureFixture[str]) -> None:
    found = train("--log-throughput", "tflops_per_rank")
    assert len(found) == 6
    assert min(found) > 0
    printed = capsys.readouterr().out
    assert "throughput per rank (TFLOP/s): " in printed
    assert "without MFU" in printed
    config = GptConfig(3, 12, 2, 40, 9, swiglu=True, num_query_groups=1, vocab_size=128)
    model, tokens = GptModel(config), torch.zeros(2, 9, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model(tokens).sum())
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in counts.items() if "attention" not in str(operator))
    assert flops_per_token(config, 0) * tokens.numel() == products


def test_trackers_get_megatrons_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int]] = []
    writer = SimpleNamespace(add_scalar=lambda name, _, step: seen.append((name, step)), flush=lambda: None)
    board = SimpleNamespace(SummaryWriter=lambda log_dir: writer)
    run = SimpleNamespace(log=lambda numbers, step: seen.extend((f"wandb {name}", step) for name in numbers))
    wandb = SimpleNamespace(init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train("--tensorboard-dir board --wandb-project tiny --log-interval 3")
    assert [each for each in seen if each in (("lm loss", 3), ("wandb grad-norm", 6))] == [
        ("lm loss", 3),
        ("wandb grad-norm", 6),
    ]
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "--wandb-project needs the package wandb" in refusal("--wandb-project tiny", capsys)


def test_a_run_without_matplotlib_trains_and_says_what_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpt.train_log.CAN_DRAW", False)
    monkeypatch.setattr("gpt.job.CAN_DRAW", False)
    train("--save run")
    printed = capsys.readouterr().out
    assert "fix: pip install '.[examples]'" in printed
    assert "loss curve  " not in printed
    assert not Path("run/loss.png").exists()
