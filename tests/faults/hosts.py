"""Two "hosts" on one machine: network namespaces joined by one link that can be cut."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.job import FLAGS, TIMEOUT_S, environment

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29611


def are_allowed() -> bool:
    """Whether this process may make network namespaces."""
    name = f"fsdp-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    _ip("netns", "delete", name)
    return True


class Hosts:
    """Two namespaces, ``10.213.7.1`` and ``10.213.7.2``, whose only way to each other is a virtual cable."""

    def __init__(self) -> None:
        self.names = tuple(f"fsdp-{os.getpid()}-{number}" for number in (0, 1))

    @contextlib.contextmanager
    def built(self) -> Iterator["Hosts"]:
        """Make the namespaces, and remove them in the end."""
        try:
            for name in self.names:
                _ip("netns", "add", name)
            links = [f"fsdp{number}" for number in (0, 1)]
            _ip(
                "link",
                "add",
                links[0],
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                links[1],
                "netns",
                self.names[1],
            )
            for name, link, address in zip(self.names, links, ADDRESSES, strict=True):
                self._inside(name, "address", "add", f"{address}/24", "dev", link)
                self._inside(name, "link", "set", link, "up")
                self._inside(name, "link", "set", "lo", "up")
            yield self
        finally:
            for name in self.names:
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip("netns", "delete", name)

    def cut(self) -> None:
        """Cut the link; no connection is closed by it."""
        self._inside(self.names[0], "link", "set", "fsdp0", "down")

    def restore(self) -> None:
        """Join the hosts again."""
        self._inside(self.names[0], "link", "set", "fsdp0", "up")

    def start(self, number: int, folder: Path, module: Sequence[str], flags: Sequence[str]) -> "subprocess.Popen[str]":
        """Start torchrun with one rank of two on a host.

        Args:
            module: what runs, after ``-m``. flags: for the training script, after the common ones.
        """
        torchrun = f"-m torch.distributed.run --nnodes 2 --node-rank {number} --nproc-per-node 1".split()
        torchrun += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT), "--monitor-interval", "0.1"]
        words = [*torchrun, "-m", *module, *FLAGS.split(), "--data-path", "text", "--save", "run", *flags]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[number], sys.executable, *words],
            cwd=folder,
            env={**environment(), "GLOO_SOCKET_IFNAME": f"fsdp{number}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _inside(self, name: str, *words: str) -> None:
        _ip("-n", name, *words)


def finish(processes: Sequence["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    """Wait for the hosts' jobs, and return exit status and output of each."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
