"""Two hosts, played by two network namespaces: torchrun joins them, and the bits are those of one.

A namespace has its own interfaces, addresses and ports; nothing but a cable (a veth pair) connects
the two. That takes root and ``ip`` from iproute2; without them the test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import offbeat
from helpers import assert_same_bits
from offbeat.transport.gloo import HEADER_BYTES

PORT = 29400
"""Any port will do: nobody else lives in these namespaces."""


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two namespaces joined by a cable, by name their addresses; gone again afterwards."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need `ip`: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("two hosts need root: network namespaces cannot be made otherwise")
    names = [f"offbeat-{os.getpid()}-{side}" for side in "ab"]
    addresses = {name: f"10.77.{os.getpid() % 256}.{n}" for n, name in enumerate(names, 1)}
    try:
        for name in names:
            made = ip("netns", "add", name, check=False)
            if made.returncode != 0:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        # Born inside, so that nothing of this ever shows outside.
        ip("-n", names[0], "link", "add", "cable", "type", "veth",
           "peer", "name", "cable", "netns", names[1])  # fmt: skip
        for name, address in addresses.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield addresses
    finally:
        for name in names:
            pids = ip("netns", "pids", name, check=False).stdout.split()
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ip("netns", "delete", name, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The same program for one process, and for one process on each of two hosts."""
    file = tmp_path / "train.py"
    file.write_text(
        textwrap.dedent(
            """
            import sys
            import torch
            from torch import nn
            import offbeat

            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                                  nn.Linear(144, 12), nn.Dropout(0.2), nn.Linear(12, 5))
            trainer = offbeat.Trainer(
                model, loss=nn.functional.cross_entropy, method=offbeat.StaleWeights(), stages=2,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), seed=3,
                timeout=60,
            )
            data = torch.Generator().manual_seed(7)
            batches = [(torch.randn(8, 1, 8, 8, generator=data),
                        torch.randint(5, (8,), generator=data)) for _ in range(12)]
            for x, y in trainer.batches(batches):
                trainer.step(x, y)
            trainer.flush()
            state = trainer.state_dict()
            print("lags", trainer.lags, "rank", trainer.rank, flush=True)
            if trainer.rank == 0:
                torch.save(state, sys.argv[1])
            """
        )
    )
    return file


def environment() -> dict[str, str]:
    source = str(Path(offbeat.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def torchrun(script: Path, out: Path, host: str, hosts: dict[str, str]) -> subprocess.Popen[str]:
    """One host's launcher. Neither can look names up here, so both are told who is who."""
    first = next(iter(hosts))
    command = [
        "ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run",
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "two-hosts",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[first]}:{PORT}",
        "--rdzv-conf", f"is_host={int(host == first)}", "--local-addr", hosts[host],
        str(script), str(out),
    ]  # fmt: skip
    with words_of(out, host).open("w") as words:
        return subprocess.Popen(
            command, env=environment() | {"GLOO_SOCKET_IFNAME": "cable"},
            stdout=words, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def words_of(out: Path, host: str) -> Path:
    return out.with_name(f"{host}.txt")


def wait_until_it_listens(host: str) -> None:
    for _ in range(600):
        found = subprocess.run(
            ["ip", "netns", "exec", host, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        if f":{PORT:04X} " in found:
            return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on {host}")


def wait_for_both(runs: list[subprocess.Popen[str]]) -> None:
    """One that fails is not waited for by the other for long."""
    until = time.monotonic() + 120
    while time.monotonic() < until and any(run.poll() is None for run in runs):
        if any(run.poll() for run in runs):
            until = min(until, time.monotonic() + 10)
        time.sleep(0.1)


def received_bytes(host: str) -> int:
    (cable,) = json.loads(ip("-n", host, "-s", "-j", "link", "show", "cable").stdout)
    return int(cable["stats64"]["rx"]["bytes"])


@pytest.mark.timeout(240)
def test_two_hosts_give_the_bits_of_one_process(
    script: Path, tmp_path: Path, hosts: dict[str, str]
) -> None:
    alone, apart = tmp_path / "alone.pt", tmp_path / "apart.pt"
    subprocess.run(
        [sys.executable, str(script), str(alone)], env=environment(), timeout=100, check=True
    )
    first, second = hosts
    runs = [torchrun(script, apart, first, hosts)]
    wait_until_it_listens(first)  # so that the second has somebody to find
    runs.append(torchrun(script, apart, second, hosts))
    wait_for_both(runs)
    outputs = [words_of(apart, host).read_text() for host in hosts]
    for run, words in zip(runs, outputs, strict=True):
        assert run.returncode == 0, "\n".join(outputs)
        assert "lags (2, 0)" in words
    assert_same_bits(torch.load(apart, weights_only=True), torch.load(alone, weights_only=True))
    for host in hosts:
        assert received_bytes(host) > 12 * HEADER_BYTES, "the batches did not cross the cable"
