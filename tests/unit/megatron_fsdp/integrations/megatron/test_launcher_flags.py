"""The flags of a Megatron-LM script are checked before anything starts; nothing of it needs Megatron."""

import pytest

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron.launcher import check_flags, notices_under_megatron

GOOD = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor")


def test_flags_that_this_engine_follows_are_read() -> None:
    flags = ["--num-layers", "12", *GOOD, "--megatron-fsdp-version=2", "--data-parallel-sharding-strategy", "optim",
             "--bf16", "--num-distributed-optimizer-instances", "2", "--tensor-model-parallel-size", "1"]  # fmt: skip
    config = check_flags(flags)
    assert (config.megatron_fsdp_version, config.data_parallel_sharding_strategy) == (2, "optim")
    assert (config.bf16, config.num_distributed_optimizer_instances) == (True, 2)


def test_a_script_that_would_train_without_this_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no --use-megatron-fsdp .* fix: add --use-megatron-fsdp --ckpt-format"):
        check_flags(["--num-layers", "12"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--use-megatron-fsdp"], r"--ckpt-format torch_dist: .* fsdp_dtensor only"),
        (
            [*GOOD, "--tensor-parallel-num-weight-shards", "2"],
            r"--tensor-parallel-num-weight-shards 2: weights are cut over 1 ranks .* leave it out",
        ),
        (
            [*GOOD, "--pipeline-model-parallel-size=4", "--mtp-num-layers", "1"],
            r"--mtp-num-layers 1 and --pipeline-model-parallel-size 4: .* give one stage",
        ),
        (
            [*GOOD, "--num-layers-per-virtual-pipeline-stage", "1", "--save", "here"],
            r"--save with virtual pipeline stages: .* train without",
        ),
        ([*GOOD, "--fp8-format", "e4m3"], r"^--fp8-format e4m3: .* leave it off$"),
        ([*GOOD, "--fp8-format", "hybrid"], r"--fp8-format hybrid: "),
        ([*GOOD, "--fp4-format", "e2m1"], r"--fp4-format e2m1: "),
        ([*GOOD, "--fp8-param-gather"], r"--fp8-param-gather: "),
        ([*GOOD, "--delay-wgrad-compute"], r"--delay-wgrad-compute: "),
        ([*GOOD, "--check-for-large-grads"], r"--check-for-large-grads: .* leave it off"),
        ([*GOOD, "--enable-cuda-graph"], r"--enable-cuda-graph: "),
        ([*GOOD, "--cuda-graph-impl", "local"], r"--cuda-graph-impl local: "),
        ([*GOOD, "--optimizer", "muon"], r"--optimizer muon: "),
        ([*GOOD, "--optimizer-cpu-offload"], r"--optimizer-cpu-offload: .* leave it off"),
        ([*GOOD, "--overlap-moe-expert-parallel-comm"], r"--overlap-moe-expert-parallel-comm: .* leave it off"),
        ([*GOOD, "--use-precision-aware-optimizer"], r"--use-precision-aware-optimizer: "),
        ([*GOOD, "--use-torch-fsdp2"], r"--use-megatron-fsdp contradicts --use-torch-fsdp2"),
        (
            [*GOOD, "--megatron-fsdp-version", "2", "--use-distributed-optimizer"],
            r"--megatron-fsdp-version 2 contradicts --use-distributed-optimizer",
        ),
        (
            [*GOOD, "--outer-dp-sharding-strategy", "optim", "--data-parallel-sharding-strategy", "optim"],
            r"--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params",
        ),
        ([*GOOD, "--delay-wgrad-compute", "--fp8-format", "e4m3"], r"--fp8-format e4m3: .*; --delay-wgrad-compute: "),
    ],
)
def test_unsupported_flags_are_refused_with_a_fix(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_flags(flags)


@pytest.mark.parametrize("flags", [["--megatron-fsdp-version", "3"], ["--pipeline-model-parallel-size", "two"]])
def test_values_of_the_wrong_kind_end_the_process_as_megatrons_parser_would(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check_flags([*GOOD, *flags])
    assert f"argument {flags[0]}: invalid" in capsys.readouterr().err


def test_only_ignored_flags_are_logged() -> None:
    flags = ["--use-sharp", "--ddp-pad-buckets-for-high-nccl-busbw", "--overlap-grad-reduce", "--fsdp-double-buffer"]
    found = notices_under_megatron(check_flags([*GOOD, *flags]))
    assert [line.split()[0] for line in found] == ["--ddp-pad-buckets-for-high-nccl-busbw", "--use-sharp"]
    assert found[1] == "--use-sharp does nothing here; needs hardware that is not used: it takes switches with SHARP"


def test_an_optimizer_that_is_not_here_is_reported_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_flags("--use-megatron-fsdp --ckpt-format fsdp_dtensor --optimizer lion".split())
    assert str(caught.value).startswith("--use-megatron-fsdp needs --optimizer adam, sgd or muon (found lion)")
    assert str(caught.value).count("lion") == 1
