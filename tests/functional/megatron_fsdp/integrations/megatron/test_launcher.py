"""The launcher finds a Megatron-LM checkout and a script in it, and says what is wrong before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fsdp.errors import ConfigError
from megatron_fsdp.integrations.megatron.launcher import main, plan_launch

GOOD = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    folder = tmp_path / "Megatron LM"
    for package in ("core", "training"):
        (folder / "megatron" / package).mkdir(parents=True)
    (folder / "pretrain_gpt.py").write_text("raise SystemExit('the script runs')\n", encoding="utf-8")
    return folder


def test_the_checkout_is_the_argument_or_the_variable_or_the_scripts_folder(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(checkout / "pretrain_gpt.py")
    assert plan_launch(script, GOOD).checkout == checkout
    monkeypatch.setenv("MEGATRON_LM_PATH", str(checkout))
    by_variable = plan_launch("pretrain_gpt.py", GOOD)
    assert (by_variable.checkout, by_variable.script) == (checkout, checkout / "pretrain_gpt.py")
    other = tmp_path / "other"
    (other / "megatron" / "core").mkdir(parents=True)
    assert plan_launch(script, GOOD, str(other)).checkout == other


def test_a_script_here_goes_before_one_of_that_name_in_the_checkout(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "pretrain_gpt.py"
    own.touch()
    monkeypatch.chdir(tmp_path)
    assert plan_launch("pretrain_gpt.py", GOOD, str(checkout)).script == own


@pytest.mark.parametrize("variable", [None, "/nowhere/Megatron-LM"])
def test_without_a_checkout_the_message_says_where_it_looked_and_how_to_name_one(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    if variable:
        monkeypatch.setenv("MEGATRON_LM_PATH", variable)
    where = f"in $MEGATRON_LM_PATH ({variable})" if variable else f"in the folder of the script ({tmp_path})"
    with pytest.raises(ConfigError) as caught:
        plan_launch("pretrain_gpt.py", GOOD)
    assert f"no Megatron-LM checkout {where}" in str(caught.value)
    assert "give --megatron-path PATH or set MEGATRON_LM_PATH" in str(caught.value)


def test_a_script_that_is_nowhere_is_refused(checkout: Path) -> None:
    with pytest.raises(ConfigError, match=r"no script 'train.py' here .* or in the checkout .*Megatron LM"):
        plan_launch("train.py", GOOD, str(checkout))


@pytest.mark.parametrize("version", [["--megatron-fsdp-version", "2"], ["--megatron-fsdp-version=1"], []])
def test_the_version_of_megatrons_engine_is_left_out(version: list[str], checkout: Path) -> None:
    flags = [*GOOD, *version, "--num-layers", "3"]
    assert plan_launch("pretrain_gpt.py", flags, str(checkout)).flags == (*GOOD, "--num-layers", "3")


def test_the_scripts_own_help_is_passed_on(checkout: Path) -> None:
    assert plan_launch("pretrain_gpt.py", ["--help"], str(checkout)).flags == ("--help",)


def test_an_environment_that_megatron_refuses_is_named_before_anything_starts_but_not_for_its_help(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match=r"found CUDA_DEVICE_MAX_CONNECTIONS=1.* unset CUDA_DEVICE_MAX_CONNECTIONS"):
        plan_launch("pretrain_gpt.py", GOOD, str(checkout))
    plan_launch("pretrain_gpt.py", ["--help"], str(checkout))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    plan_launch("pretrain_gpt.py", GOOD, str(checkout))


def test_flags_are_refused_before_the_script_runs(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--megatron-path", str(checkout), "pretrain_gpt.py", *GOOD, "--fp8-format", "e4m3"])
    assert caught.value.code == 2
    assert "megatron_fsdp.megatron: --fp8-format e4m3" in capsys.readouterr().err


def test_without_megatron_core_in_it_the_checkout_is_refused(checkout: Path) -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "from megatron_fsdp.megatron import main\n"
        f"main(['--megatron-path', {str(checkout)!r}, 'pretrain_gpt.py', *{GOOD!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError: install() found no megatron.core" in done.stderr
    assert "the script runs" not in done.stderr
