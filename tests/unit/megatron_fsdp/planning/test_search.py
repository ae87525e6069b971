"""The search for what fits: which setups it tries, how it ranks them, and what it says of the rest."""

import json
import re
from typing import Any

import pytest

from megatron_fsdp.__main__ import main

GIB = 2**30
Fit = dict[str, Any]


def fit(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a search as JSON."""
    assert main(["plan", *arguments.split(), "--json"]) == code
    plain = json.loads(capsys.readouterr().out)
    assert isinstance(plain, dict)
    return plain


def test_everything_that_fits_is_below_the_limit_and_the_fastest_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = fit(capsys, "--model gpt2 --fit 8GiB --gpus 8")["fit"]
    assert len(found["fitting"]) > 10
    assert all(each["memory_bytes"] <= 8 * GIB for each in found["fitting"])
    times = [each["step_seconds"] for each in found["fitting"]]
    assert times == sorted(times)


def test_every_setup_trains_on_the_same_number_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    found = fit(capsys, "--model gpt2 --fit 200GiB --gpus 4 --global-batch 48 --strategy optim")["fit"]
    assert found["sequences_per_step"] == 48
    sizes = {(each["micro_batch"], each["num_microbatches"]) for each in found["fitting"]}
    assert sizes == {(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)}


def test_ranks_are_split_into_every_mesh_for_hybrid_sharding(capsys: pytest.CaptureFixture[str]) -> None:
    found = fit(capsys, "--model gpt2 --fit 200GiB --gpus 12 --micro-batch 1 --recompute none")["fit"]
    meshes = {
        strategy: {tuple(each["mesh"]) for each in found["fitting"] if each["strategy"] == strategy}
        for strategy in ("hsdp", "hfsdp", "optim", "no_shard")
    }
    hybrid = {(6, 2), (4, 3), (3, 4), (2, 6)}
    assert meshes == {"hsdp": hybrid, "hfsdp": hybrid, "optim": {(12,)}, "no_shard": {(12,)}}


def test_the_plan_of_the_fastest_follows(capsys: pytest.CaptureFixture[str]) -> None:
    plain = fit(capsys, "--model gpt2 --fit 8GiB --gpus 8")
    first = plain["fit"]["fitting"][0]
    assert plain["strategy"] == first["strategy"]
    assert plain["memory"]["total_bytes"] == first["memory_bytes"]
    assert plain["time"]["total_seconds"] == first["step_seconds"]
    assert f"--strategy {first['strategy']} (found by --fit): what is sharded" in plain["decisions"]


def test_what_is_found_is_what_a_plan_of_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    last = fit(capsys, "--model gpt2 --fit 8GiB --gpus 8")["fit"]["fitting"][-1]
    plain = fit(
        capsys,
        f"--model gpt2 --mesh {'x'.join(map(str, last['mesh']))} --strategy {last['strategy']} --micro-batch "
        f"{last['micro_batch']} --num-microbatches {last['num_microbatches']} --recompute {last['recompute']}",
    )
    assert plain["memory"]["total_bytes"] == last["memory_bytes"]
    assert plain["time"]["total_seconds"] == last["step_seconds"]


def test_options_that_are_given_stay(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--strategy hsdp --mesh 2x8 --micro-batch 2 --recompute full"
    found = fit(capsys, f"--model gpt2 --fit 200GiB {options}")["fit"]
    (only,) = found["fitting"]
    assert (only["strategy"], only["mesh"], only["micro_batch"]) == ("hsdp", [2, 8], 2)
    assert (only["num_microbatches"], only["recompute"]) == (4, "full")


def test_a_given_number_of_microbatches_decides_their_size(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 4 --num-microbatches 3 --global-batch 24 --recompute none --strategy optim"
    found = fit(capsys, f"--model gpt2 --fit 200GiB {options}")["fit"]
    assert [(each["num_microbatches"], each["micro_batch"]) for each in found["fitting"]] == [(3, 2)]


def test_selective_recomputation_is_tried_where_scores_are_stored(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpus 4 --strategy optim --attention unfused --micro-batch 1"
    found = fit(capsys, f"--model gpt2 --fit 200GiB {options}")["fit"]
    assert {each["recompute"] for each in found["fitting"]} == {"none", "selective", "full"}


def test_where_nothing_fits_the_table_says_what_the_smallest_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --model llama3-8b --fit 10GiB --gpus 4 --strategy no_shard".split()) == 1
    page = capsys.readouterr().out
    assert page.startswith("0 of 8 setups fit 10.00 GiB on 4 ranks, 32 sequences per step")
    assert re.search(r"no_shard +4 .* at least 141.21 GiB, 131.21 GiB too much, with micro-batch 1 and ", page)
    assert "AdamW moments 59.83 GiB" in page


def test_what_has_no_layout_is_told_apart_from_what_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    factory = "tests.unit.megatron_fsdp.cli.test_plan:few_long_rows"
    found = fit(capsys, f"--factory {factory} --fit 10TiB --gpus 64 --micro-batch 1")["fit"]
    reasons = {(each["strategy"], tuple(each["mesh"])): each["reason"] for each in found["rejected"]}
    assert reasons["optim", (64,)].startswith("no layout: unit 'blocks.1': padding makes")
    assert {each["strategy"] for each in found["fitting"]} >= {"no_shard", "hsdp"}


def test_reserved_memory_is_not_given_away(capsys: pytest.CaptureFixture[str]) -> None:
    def most(options: str) -> int:
        found = fit(capsys, f"--model gpt2 --fit 8GiB --gpus 4 --recompute none {options}")["fit"]["fitting"]
        return max(int(each["memory_bytes"]) for each in found)

    assert most("--reserve 3GiB") <= 8 * GIB
    rest = fit(capsys, "--model gpt2 --fit 8GiB --gpus 4 --reserve 3GiB")["memory"]["parts"]
    assert {"name": "reserve", "num_bytes": 3 * GIB, "is_known": True} in rest


def test_a_slower_network_makes_replicas_over_nodes_the_faster_choice(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(options: str) -> dict[str, float]:
        found = fit(capsys, f"--model gpt2 --fit 80GiB --gpus 16 --micro-batch 1 {options}")["fit"]["fitting"]
        # Fastest first.
        return {each["strategy"]: each["step_seconds"] for each in reversed(found)}

    slow, fast = seconds("--network-bandwidth 1GB/s"), seconds("--network-bandwidth 50GB/s")
    assert max(slow["hsdp"], slow["hfsdp"]) < slow["optim_grads_params"]
    assert all(slow[strategy] > fast[strategy] for strategy in fast)
