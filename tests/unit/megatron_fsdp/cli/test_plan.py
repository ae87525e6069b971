"""``megatron-fsdp plan``: its page, JSON, charts and refusals."""

import argparse
import contextlib
import functools
import io
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import megatron_fsdp
from megatron_fsdp.__main__ import main
from megatron_fsdp.formatting import Table, format_seconds
from megatron_fsdp.planning import catalog, plan_arguments
from megatron_fsdp.planning.cost_model import Hardware
from megatron_fsdp.planning.plan_arguments import (
    byte_count,
    bytes_per_second,
    mesh_sizes,
    operations_per_second,
    seconds,
)
from tests.harness.grids import nightly_but

LLAMA = ("plan", "--model", "llama3-8b", "--mesh", "8")
GPT2 = ("plan", "--model", "gpt2", "--mesh", "8")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)


class LongRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1 << 22, 4, bias=False) for _ in range(2)])


def few_long_rows() -> nn.Module:
    return LongRows()


def make_model() -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(4))
    model.head = nn.Linear(64, 10)
    return model


FACTORY = ("plan", "--factory", f"{__name__}:make_model", "--mesh", "4")


@functools.cache
def run(*arguments: str) -> str:
    """Return the command's output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(arguments) == 0
    return printed.getvalue()


def plan_of(*arguments: str) -> dict[str, Any]:
    plain = json.loads(run(*arguments, "--json"))
    assert isinstance(plain, dict)
    return plain


def parts_of(plain: dict[str, Any]) -> dict[str, int]:
    parts: dict[str, int] = plain["memory"]["parts"]
    return parts


def test_the_page_folds_equal_layers_and_names_model_mesh_and_strategy() -> None:
    page = run(*LLAMA, "--dtype", "fp32")
    assert page.startswith("llama3-8b: 8.03 B parameters, on 8 ranks, optim_grads_params\n")
    assert "layer.0 .. layer.31 (32 alike, each)" in page
    assert "1 microbatch of 4,096 tokens, at 400 Tflop/s\n" in page
    assert "; dp 450 GB/s\n" in page


def test_json_counts_every_unit_and_byte_once() -> None:
    plain = plan_of(*LLAMA)
    assert plain["format"] == 2
    assert plain["model"]["num_parameters"] == 8_030_261_248
    units = plain["report"]["units"]
    assert [(unit["count"], len(unit["names"])) for unit in units] == [(1, 1), (1, 1), (32, 32), (1, 1)]
    resting = sum(
        unit["count"] * buffer["num_bytes"]
        for unit in units
        for group in unit["groups"]
        for buffer in group["resting"]
        if not buffer["shares"]
    )
    parts = parts_of(plain)
    assert resting == parts["main weights"]
    assert parts["gradients"] == plain["report"]["gradient_bytes"] > 0
    assert resting == plain["report"]["persistent_bytes"]
    assert parts["AdamW moments"] == plain["report"]["optimizer_bytes"]
    assert plain["memory"]["total_bytes"] == sum(parts.values())


def test_every_key_of_the_json_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "planning.md").read_text(encoding="utf-8")
    plain = plan_of("plan", "--model", "gpt2", "--mesh", "8", "--fit", "80GiB", "--micro-batch", "1")
    keys = {*plain, *plain["fit"], *plain["fit"]["fitting"][0], *plain["workload"], *plain["model"], *plain["time"]}
    assert not [key for key in keys if f"`{key}`" not in text]


def test_four_numbers_of_fp32_make_sixteen_bytes_a_parameter() -> None:
    plain = plan_of(*LLAMA, "--mesh", "1")
    parts = parts_of(plain)
    numel = 8_030_261_248
    wanted = {"main weights": 4, "gradients": 4, "AdamW moments": 8}
    assert "compute weights" not in parts
    for name, itemsize in wanted.items():
        assert parts[name] == pytest.approx(itemsize * numel, rel=1e-3)


@pytest.mark.parametrize(
    ("option", "part", "factor"),
    [
        ("--main-dtype=bf16", "main weights", 0.5),
        ("--main-grads-dtype=bf16", "gradients", 0.5),
        ("--moments-dtype=bf16", "AdamW moments", 0.5),
        ("--micro-batch=3", "activations", 3),
        ("--dtype=fp32", "main weights", 1),
    ],
)
def test_each_option_changes_its_part_of_memory(option: str, part: str, factor: float) -> None:
    def size(*options: str) -> int:
        return parts_of(plan_of(*GPT2, *options))[part]

    assert size(option) == pytest.approx(factor * size(), rel=1e-4)


def test_a_strategy_for_one_axis_keeps_replicas_on_the_outer_of_two() -> None:
    one = plan_of(*GPT2, "--mesh", "2x4", "--strategy", "optim_grads_params")
    assert one["memory"] == plan_of(*GPT2, "--mesh", "2x4", "--strategy", "hsdp")["memory"]
    assert {total["axis"] for total in one["report"]["collectives"]} == {"outer", "inner"}


def test_planning_time_does_not_grow_with_parameters_and_ranks() -> None:
    # Measure CPU time, because other processes may use the machine.
    def spent(*words: str) -> float:
        before = time.process_time()
        run.__wrapped__("plan", *words)
        return time.process_time() - before

    spent("--model", "gpt2", "--mesh", "8")
    small, large = spent("--model", "gpt2", "--mesh", "8"), spent("--model", "llama3-70b", "--mesh", "2048x8")
    assert large / 82 < 3 * small / 13


MESHES = ("8", "64", "1024", "2048x8")


EVERYWHERE = [*zip(catalog.names(), itertools.cycle(MESHES), strict=False)]
QUICK = [each for each in EVERYWHERE if each[0] in ("gpt2", "llama3-8b", "mixtral-8x7b", "siglip-so400m")]


@pytest.mark.parametrize(("name", "mesh"), nightly_but(QUICK, EVERYWHERE))
def test_a_plan_gathers_and_reduces_each_unit_of_every_model_once_in_any_world(name: str, mesh: str) -> None:
    plain = plan_of("plan", "--model", name, "--mesh", mesh)
    units = sum(unit["count"] for unit in plain["report"]["units"] if unit["groups"])
    counts: Counter[tuple[str, str]] = Counter()
    for each in plain["report"]["collectives"]:
        counts[each["phase"], each["kind"]] += each["count"]
    if mesh == "2048x8":
        assert counts.pop(("backward", "all_reduce")) == units
    # The last unit of forward keeps its weights for its backward.
    assert counts == {
        ("forward", "all_gather"): units,
        ("backward", "all_gather"): units - 1,
        ("backward", "reduce_scatter"): units,
    }


def test_the_page_of_a_stage_says_that_stages_are_counted_from_0() -> None:
    page = run("plan", "--model", "gpt2", "--world", "4", "--pp", "2", "--stage", "1")
    assert page.partition("\n")[0].endswith("stage 1 of 0 to 1")


@pytest.mark.parametrize(
    ("found", "words"), [(2.0, "2 s"), (1.84e-10, "0 s"), (0.0, "0 s"), (2e-9, "0.002 us"), (0.0123, "12.3 ms")]
)
def test_a_time_that_rounds_to_zero_is_shown_as_none(found: float, words: str) -> None:
    assert format_seconds(found) == words
    assert Table.of([{"exposed_seconds": found}]).rows[1][0] == ("-" if words == "0 s" else words)


def test_models_are_listed() -> None:
    assert run("plan", "--list-models").split() == list(catalog.names())


def test_a_config_file_is_planned_like_the_catalogs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(catalog.load("gpt2")))
    from_file = plan_of("plan", "--hf-config", str(tmp_path / "config.json"), "--mesh", "8")
    assert from_file["memory"] == plan_of(*GPT2)["memory"]


def test_a_factorys_repeated_blocks_are_units_and_its_activations_not_known() -> None:
    page = run(*FACTORY)
    assert "blocks.0 .. blocks.3 (4 alike, each)" in page
    assert "activations are not known" in page


def test_a_factorys_units_can_be_named() -> None:
    units = plan_of(*FACTORY, "--unit-class", "Linear")["report"]["units"]
    assert [unit["names"] for unit in units] == [["Module"], [f"blocks.{n}.up" for n in range(4)], ["head"]]


def test_activations_that_were_measured_count_per_sequence() -> None:
    assert parts_of(plan_of(*FACTORY, "--activation-bytes", "1KiB", "--micro-batch", "3"))["activations"] == 3072


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh 8", "found none. fix: give exactly one of --model, --hf-config and --factory"),
        ("--model gpt2 --factory a:b --mesh 8", "found --model and --factory"),
        ("--model gpt3 --mesh 8", "no model 'gpt3' in the catalog; did you mean gpt2?"),
        (
            "--model lama3-8b --mesh 8",
            "did you mean llama3-8b? fix: give a name that megatron-fsdp plan --list-models lists",
        ),
        ("--model gpt2 --mesh 8 --strategy zero3", "fix: use optim_grads_params (megatron-fsdp plan --help)"),
        ("--model gpt2 --mesh 8 --strategy ZeRO-2", "fix: use optim_grads (megatron-fsdp plan --help)"),
        (
            "--model gpt2 --meshes 8",
            "unknown option --meshes. fix: use --mesh, the most similar one (megatron-fsdp plan --help)",
        ),
        ("gpt2 --mesh 8", "unexpected argument 'gpt2'"),
        ("--model gpt2", "--mesh is missing"),
        (
            "--model gpt2 --mesh 8x",
            "argument --mesh: '8x' is no mesh. fix: write 64 for one axis, 8x128 for outer x inner",
        ),
        ("--model gpt2 --mesh 2x2x2", "'2x2x2' is no mesh"),
        ("--model gpt2 --mesh 0", "'0' is no mesh"),
        ("--model gpt2 --mesh 16 --strategy hsdp", "--mesh 16 has one. fix: --mesh OUTERxINNER, such as --mesh 2x8"),
        (
            "--model gpt2 --mesh 8 --gather-dtype int8_block --strategy optim",
            "fix: placements=Placements.optim_grads_params()",
        ),
        ("--model gpt2 --mesh 8 --micro-batch 0", "argument --micro-batch: '0' is not an integer of at least 1"),
        ("--model gpt2 --mesh 8 --bandwidth 1G 2G", "--bandwidth has 2 values, --mesh 1 axes. fix: give one per axis"),
        ("--model gpt2 --mesh 8 --bandwidth 400Gb/s", "'400Gb/s' is no amount that fits here. fix: write it as 50GB/s"),
        ("--model gpt2 --mesh 8 --gpus 8", "--gpus 8 belongs to --fit SIZE"),
        ("--model gpt2 --mesh 8 --unit-class A", "--unit-class A belongs to --factory"),
        ("--model gpt2 --fit 80 --gpus 8", "'80' is no amount that fits here. fix: write it as 80GiB or 80GB"),
        ("--model gpt2 --fit 80GiB", "--fit needs --gpus N"),
        ("--model gpt2 --fit 80GiB --gpus 6 --mesh 8", "--gpus 6 contradicts --mesh 8"),
        ("--model gpt2 --fit 80GiB --gpus 8 --global-batch 9", "no multiple of the 8 ranks. fix: --global-batch 8"),
        ("--model gpt2 --fit 80GiB --gpus 8 --global-batch 8 --micro-batch 3", "1 sequences per rank and step cannot"),
        ("--model llama3-8b --world 60 --pp 16", "--tp x --pp x --cp is 16, which does not divide --world 60"),
        ("--model llama3-8b --mesh 8 --ep 2", "--ep 2: llama has no routed experts"),
        ("--model llama3-8b --mesh 8 --tp 3", "--tp 3 does not divide 32 attention heads"),
        ("--model llama3-8b --mesh 8 --pp 64", "--pp 64 is more than the model's 32 layers"),
        ("--model mixtral-8x7b --mesh 8 --ep 16", "--etp x --ep is 16, which does not divide the 8 ranks"),
        ("--model mixtral-8x7b --mesh 96 --ep 3", "--ep 3 does not divide dimension 0 of experts: gate_up_proj"),
        ("--model llama3-8b --mesh 8 --pp 2 --stage 2", "--stage 2: there are 2 stages. fix: --stage 0 to 1"),
        ("--model llama3-8b --mesh 8 --world 8", "--world 8 contradicts --mesh 8"),
        ("--model siglip-so400m --mesh 8 --tp 2", "--tp, --pp and --cp divide language models"),
        ("--model llama3-8b --fit 80GiB --gpus 8 --tp 2", "--tp is not searched over"),
        ("--hf-config /nowhere/config.json --mesh 8", "--hf-config /nowhere/config.json: "),
        ("--factory nowhere:make --mesh 8", "--factory nowhere:make: No module named 'nowhere', neither in "),
        (f"--factory {__name__}:make_modle --mesh 8", "has no 'make_modle'. fix: the nearest is make_model"),
        ("--factory nowhere --mesh 8", "write it as package.module:function"),
        (f"--factory {__name__}:LLAMA --mesh 8", "LLAMA is a tuple. fix: name a function"),
        (
            f"--factory {__name__}:make_model --mesh 8 --unit-class Foo",
            "--unit-class Foo: no module has this class. fix: use classes of the model: Block, Linear",
        ),
        ("--model gpt2 --mesh 8 --html plan.html", "unknown option --html"),
        (f"--factory {__name__}:few_long_rows --mesh 64", "padding makes"),
    ],
)
def test_contradictory_options_are_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    try:
        code: Any = main(["plan", *arguments.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.startswith("megatron-fsdp plan: ")
    assert len(found.err.splitlines()) == 1
    assert found.out == ""


def test_the_help_gives_the_default_of_every_option_that_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, value in plan_arguments.DEFAULTS.items():
        described = text.partition(f" --{name.replace('_', '-')} ")[2].partition(" --")[0]
        assert isinstance(value, bool) or re.search(rf"default:? {value}\b", text), (name, described)
    machine = Hardware()
    for rate in (machine.memory_bandwidth, machine.node_bandwidth, machine.network_bandwidth):
        assert f"(default {rate / 1e9:.0f}GB/s)" in text
    assert f"(default {machine.flops / 1e12:.0f}T)" in text
    assert "examples: megatron-fsdp plan --model llama3-8b --mesh 8" in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megatron-fsdp-dbuffer {megatron_fsdp.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "no command given. fix: give one of plan"), (["plane"], "'plane' is no command. fix: use plan, the most")],
)
def test_an_unknown_command_is_refused_with_a_list_of_commands(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (byte_count, "80GiB", 80 * 2**30),
        (byte_count, "1.5 GB", 1_500_000_000),
        (byte_count, "512B", 512),
        (byte_count, "2T", 2 * 10**12),
        (bytes_per_second, "50GB/s", 50e9),
        (bytes_per_second, "50G", 50e9),
        (bytes_per_second, "4e11", 4e11),
        (operations_per_second, "400T", 400e12),
        (operations_per_second, "1.2PFLOPS", 1.2e15),
        (seconds, "5us", 5e-6),
        (seconds, "0", 0.0),
        (seconds, "2ms", 2e-3),
        (mesh_sizes, "64", (64,)),
        (mesh_sizes, "8x128", (8, 128)),
        (mesh_sizes, "8X128", (8, 128)),
    ],
)
def test_amounts_are_read_as_they_are_written(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == pytest.approx(value) if isinstance(value, float) else read(text) == value


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (byte_count, "80"),
        (byte_count, "80Gb"),
        (byte_count, "80gib"),
        (byte_count, "80 apples"),
        (byte_count, "-1GiB"),
        (byte_count, "0GiB"),
        (bytes_per_second, "400Gb/s"),
        (bytes_per_second, "50GB/h"),
        (operations_per_second, "fast"),
        (seconds, "5 minutes"),
        (mesh_sizes, "x8"),
        (mesh_sizes, "-8"),
        (mesh_sizes, "1x2x3"),
    ],
)
def test_a_malformed_amount_is_refused_with_an_example(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write (it as|64) "):
        read(text)
