"""One version of offbeat against another, taking turns in one run.

    git worktree add ../old b4ead2a
    python -m benchmarks.against.run --old ../old/src --out results.jsonl simulator:stash
    python -m benchmarks.against.run --old ../old/src two-cores:resnet20 two-cores:alexnet
    python -m benchmarks.against.run --old ../old/src one-gpu:resnet-56-128-fp32

Both versions stay alive and take turns; while one works the other waits for a word. What counts is
the ratio of both times of the same round, new over old; the interval is that of the mean of their
logarithms (Student's t).
"""

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

_T95 = {10: 2.23, 20: 2.09, 30: 2.04, 60: 2.0}
"""Student's t for 95 %, by degrees of freedom at least."""


class Version:
    """The processes of one version on one workload."""

    def __init__(self, source: Path, workload: str) -> None:
        ranks = 2 if workload.startswith("two-cores") else 1
        root = Path(__file__).parents[2]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{source.resolve()}{os.pathsep}{root}",
            "OMP_NUM_THREADS": "1" if ranks == 2 else str(os.cpu_count() or 1),
        }
        if ranks == 2:
            environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            environment |= {"MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        self._children = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "CORE": str(rank)}
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.against.child", workload],
                    env=environment | (own if ranks == 2 else {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=root,
                    text=True,
                )
            )
        self.ready = self._hear()
        assert all(str(source.resolve()) in reply["from"] for reply in self.ready), self.ready

    def _hear(self) -> list[dict[str, Any]]:
        replies = []
        for child in self._children:
            assert child.stdout is not None
            replies.append(json.loads(child.stdout.readline()))
        return replies

    def turn(self, lead: int, steps: int) -> float:
        """Milliseconds per step of the slower of its processes."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(f"{lead} {steps}\n")
            child.stdin.flush()
        return max(float(reply["seconds"]) for reply in self._hear()) / steps * 1e3

    def end(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean of the ratios and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    freedom = len(logs) - 1
    t = next((_T95[n] for n in sorted(_T95, reverse=True) if freedom >= n), 2.6)
    mean, half = statistics.mean(logs), t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(workload: str, old: Path, new: Path, rounds: int, steps: int) -> dict[str, Any]:
    versions = {"old": Version(old, workload), "new": Version(new, workload)}
    turns = []
    try:
        for number in range(rounds):
            order = list(versions) if number % 2 else list(reversed(versions))
            ms = {name: versions[name].turn(2, steps) for name in order}
            turns.append([round(ms["old"], 4), round(ms["new"], 4)])
    finally:
        for version in versions.values():
            version.end()
    mean, low, high = interval([new_ms / old_ms for old_ms, new_ms in turns])
    print(f"{workload}: new over old {mean:.3f} (95 %: {low:.3f} to {high:.3f}), {rounds} rounds")
    return {
        "workload": workload,
        "ratio": [round(value, 4) for value in (mean, low, high)],
        "steps": steps,
        "torch": versions["new"].ready[0]["ready"],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "ms_old_new": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--old", type=Path, required=True, help="the src folder of the old one")
    parser.add_argument("--new", type=Path, default=Path("src"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for workload in given.workloads:
        row = compare(workload, given.old, given.new, given.rounds, given.steps)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
