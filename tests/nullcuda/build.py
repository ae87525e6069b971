"""Build a CUDA machine without a GPU: PyTorch's CUDA build over a driver, cuBLAS and NCCL that only keep a log.

    python tests/nullcuda/build.py builds all missing or outdated parts, and prints the path of the machine's python

Needs Linux on x86-64, gcc with binutils, and 3 GB of disk. The first time it downloads PyTorch's wheel (530 MB) from
the package index of pip; afterwards it takes seconds. docs/design/null_cuda.md lists the real parts of this machine.

Variables: NULLCUDA_DIR, the folder (default: megatron-fsdp-nullcuda in the user's cache folder); NULLCUDA_TORCH, the
version of PyTorch (default: 2.13.0).
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
TORCH = os.environ.get("NULLCUDA_TORCH", "2.13.0")
# Packages for our tests. PyTorch's metadata names the packages that PyTorch needs.
TOOLS = ("numpy", "setuptools>=77", "pytest", "hypothesis", "safetensors", "psutil", "tqdm")
HEADERS = ("nvidia-cuda-runtime>=13,<14", "nvidia-cuda-crt>=13,<14")
# Prefixes of NVIDIA's functions. Those of the driver itself begin with cu and a capital letter.
FOREIGN = re.compile(r"(__cuda|__nv|cu|nccl|nv)[A-Za-z0-9_]+")
DRIVER = re.compile(r"cu(?!File)[A-Z][A-Za-z0-9_]+")

LAUNCHER = """#!/bin/sh
# LD_PRELOAD: its functions stand for those of the libraries that PyTorch links, which are empty files in lib.
export LD_LIBRARY_PATH={folder}/lib LD_PRELOAD={folder}/libnullcuda.so NULLCUDA={folder}/libnullcuda.so
export OMP_NUM_THREADS=1 TORCH_NCCL_ENABLE_MONITORING=0
exec {folder}/venv/bin/python "$@"
"""


def main() -> Path:
    """Return the path of the machine's python, after building its parts."""
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            sys.exit(f"error: the null CUDA machine needs {tool}. fix: install gcc and binutils")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("NULLCUDA_DIR") or cache / "megatron-fsdp-nullcuda").absolute() / f"torch-{TORCH}"
    folder.mkdir(parents=True, exist_ok=True)
    make_environment(folder)
    wanted = fingerprint()
    stamp = folder / "built"
    if not stamp.exists() or stamp.read_text() != wanted:
        make_libraries(folder)
        launcher = folder / "python"
        launcher.write_text(LAUNCHER.format(folder=folder))
        launcher.chmod(0o755)
        run(launcher, "-c", "import torch; (torch.zeros(4, device='cuda') + 1).cpu()")
        stamp.write_text(wanted)
    return folder / "python"


def run(*command: object) -> str:
    """Return a command's output; end the program with the command's errors if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def fingerprint() -> str:
    """Return a text that changes with the sources and with this file."""
    files = [*sorted(SOURCES.iterdir()), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def make_environment(folder: Path) -> None:
    """Install PyTorch's CUDA build without NVIDIA's libraries, what else it needs, and the headers of CUDA."""
    stamp = folder / "installed"
    needed = repr((TORCH, TOOLS, HEADERS))
    if stamp.exists() and stamp.read_text() == needed:
        return
    print(f"Installing PyTorch {TORCH} for CUDA into {folder}: 530 MB, once", file=sys.stderr)
    run(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv/bin/python"
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    # === leaves out builds with a local version, such as 2.13.0+cpu.
    run(*pip, "--no-deps", f"torch==={TORCH}")
    code = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
    required = [
        line
        for line in run(python, "-c", code).splitlines()
        if not re.match("nvidia|cuda", line) and "extra ==" not in line
    ]
    run(*pip, *required, *TOOLS)
    run(*pip, "--no-deps", "--upgrade", "--target", folder / "headers", *HEADERS)
    if "cuda" not in run("nm", "-D", "--undefined-only", *libraries_of_torch(folder)):
        sys.exit(
            f"error: pip installed a build of PyTorch {TORCH} without CUDA. fix: point pip at an index that has the "
            f"CUDA build of that version, remove {folder}, and build again"
        )
    stamp.write_text(needed)


def libraries_of_torch(folder: Path) -> list[Path]:
    """Return PyTorch's shared libraries."""
    return sorted(folder.glob("venv/lib/python*/site-packages/torch/lib/*.so"))


def make_libraries(folder: Path) -> None:
    """Compile libnullcuda.so, libcuda.so.1, and an empty file for each library of NVIDIA that PyTorch names."""
    (header,) = folder.glob("headers/nvidia/**/cuda_runtime_api.h")
    include, lib, work = header.parent, folder / "lib", folder / "work"
    for made in (lib, work):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
    torch_libraries = libraries_of_torch(folder)
    # nm prints "U cudaMalloc@libcudart.so.13".
    symbols = {
        line.split()[-1].partition("@")[0]
        for line in run("nm", "-D", "--undefined-only", *torch_libraries).splitlines()
        if " U " in line
    }
    wanted = {symbol for symbol in symbols if FOREIGN.fullmatch(symbol)}

    gcc = ("gcc", "-O1", "-w", "-shared", "-fPIC", f"-I{include}")
    runtime = [file for file in sorted(SOURCES.glob("*.c")) if file.name != "driver.c"]
    for name, sources, symbols, soname in (
        ("libnullcuda.so", runtime, {one for one in wanted if not is_of_the_driver(one)}, "libnullcuda.so"),
        ("lib/libcuda.so.1", [SOURCES / "driver.c"], driver_functions(include, wanted), "libcuda.so.1"),
    ):
        first = work / "written.so"
        run(*gcc, *sources, "-o", first, "-ldl", "-lpthread")
        written = {line.split()[-1] for line in run("nm", "-D", "--defined-only", first).splitlines()}
        stubs = work / "stubs.c"
        # Every other function succeeds and does nothing.
        stubs.write_text("".join(f"long {symbol}() {{ return 0; }}\n" for symbol in sorted(symbols - written)))
        run(*gcc, f"-Wl,-soname,{soname}", *sources, stubs, "-o", folder / name, "-ldl", "-lpthread")
    (lib / "libcuda.so").symlink_to("libcuda.so.1")

    empty = work / "empty.c"
    empty.write_text("")
    named = re.findall(r"\[(lib(?:cu|nccl|nv)\w*\.so[.0-9]*)\]", run("readelf", "-d", *torch_libraries))
    for name in sorted(set(named)):
        if name != "libcuda.so.1":
            run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", empty, "-o", lib / name)


def is_of_the_driver(symbol: str) -> bool:
    """Return whether a function is one of libcuda.so.1, such as cuInit."""
    return DRIVER.fullmatch(symbol) is not None


def driver_functions(include: Path, wanted: set[str]) -> set[str]:
    """Return the functions of the driver that PyTorch or Triton may look up: those that the header declares."""
    declared = re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", (include / "cuda.h").read_text(errors="replace"))
    return {*declared, *(symbol for symbol in wanted if is_of_the_driver(symbol))}


if __name__ == "__main__":
    print(main())
