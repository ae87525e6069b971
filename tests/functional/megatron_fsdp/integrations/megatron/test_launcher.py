"""The launcher runs a script, and reports wrong arguments before it starts."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_fsdp.integrations.megatron import launcher
from megatron_fsdp.integrations.megatron.launcher import main

GOOD = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("import sys, pathlib\nprint('the script runs', *sys.argv[1:], sys.path[0], __name__)\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["main"])
    return str(path)


@pytest.mark.parametrize("version", [["--megatron-fsdp-version", "2"], ["--megatron-fsdp-version=1"], []])
def test_the_script_runs_as_the_main_program_without_the_version_of_megatrons_engine(
    version: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(launcher, "install", return_value=["megatron.a"]):
        assert main([script, *GOOD, *version, "--use-sharp", "--num-layers", "3"]) == 0
    first, second, ran = capsys.readouterr().out.splitlines()
    assert first == "megatron_fsdp: pretrain_gpt.py runs on this engine; changed: megatron.a"
    assert second.startswith("megatron_fsdp: --use-sharp does nothing here")
    assert ran == f"the script runs {' '.join(GOOD)} --use-sharp --num-layers 3 {Path(script).parent} __main__"


@pytest.mark.parametrize(
    ("flags", "connections", "message"),
    [
        ([*GOOD, "--fp8-format", "e4m3"], "8", "megatron_fsdp.megatron: --fp8-format e4m3"),
        (GOOD, "1", "found CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron refuses"),
        (None, "8", "found no script "),
    ],
)
def test_unsupported_flags_are_refused_before_the_script_runs(
    flags: list[str] | None,
    connections: str,
    message: str,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    with pytest.raises(SystemExit) as caught:
        main([script, *flags] if flags is not None else ["nowhere.py", *GOOD])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_scripts_own_help_is_passed_on(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with mock.patch.object(launcher, "install", return_value=[]):
        main([script, "--help"])
    assert "the script runs --help" in capsys.readouterr().out


def test_without_megatron_core_the_script_does_not_run(script: str) -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        f"from megatron_fsdp.megatron import main\nmain([{script!r}, *{GOOD!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ConfigError: install() cannot import megatron.core" in done.stderr
    assert "the script runs" not in done.stdout
