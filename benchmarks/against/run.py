"""One version of offbeat against another, taking turns in one run.

    git worktree add ../old b4ead2a
    python -m benchmarks.against.run --old ../old/src --out results.jsonl simulator:stash
    python -m benchmarks.against.run --old ../old/src two-cores:resnet20 two-cores:alexnet
    python -m benchmarks.against.run --old ../old/src one-gpu:resnet-56-128-fp32

Both versions stay alive and take turns; while one works the other waits for a word. What counts is
the ratio of both times of the same round, new over old; the interval is that of the mean of their
logarithms. Two processes of one version differ by some thousandths for as long as
they live: ``--lives 6`` starts both anew six times, and the interval is that of the lives' means.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

from benchmarks.intervals import ratio
from benchmarks.stored import Row


class Version:
    """The processes of one version on one workload."""

    def __init__(self, source: Path, workload: str, time: str) -> None:
        ranks = 2 if workload.startswith("two-cores") or workload == "small:two" else 1
        self._time = time
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
        self.ready: list[Row] = []
        self._source = source

    def wait_until_ready(self) -> None:
        self.ready = self._hear()
        source = self._source
        assert all(str(source.resolve()) in reply["from"] for reply in self.ready), self.ready

    def _hear(self) -> list[Row]:
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
        return max(float(reply[self._time]) for reply in self._hear()) / steps * 1e3

    def end(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _means(turns: list[list[float]]) -> list[float]:
    """The geometric means of both versions' turns."""
    return [geometric_mean(times) for times in zip(*turns, strict=True)]


def compare(
    workload: str, old: Path, new: Path, lives: int, rounds: int, steps: int, time: str
) -> Row:
    turns = []
    for life in range(lives):
        versions = {
            name: Version(source, workload, time) for name, source in (("old", old), ("new", new))
        }
        try:
            for version in versions.values():
                version.wait_until_ready()
            for number in range(rounds):
                order = list(versions) if (number + life) % 2 else list(reversed(versions))
                ms = {name: versions[name].turn(2, steps) for name in order}
                turns.append([round(ms["old"], 4), round(ms["new"], 4)])
        finally:
            for version in versions.values():
                version.end()
    times = turns if lives == 1 else [_means(turns[n * rounds :][:rounds]) for n in range(lives)]
    found = ratio([new_ms for _, new_ms in times], [old_ms for old_ms, _ in times])
    print(f"{workload}: new over old {found:.3f}, {lives} lives of {rounds} rounds")
    return {
        "workload": workload,
        "ratio": [round(value, 4) for value in found.values],
        "time": time,
        "lives": lives,
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
    parser.add_argument("--lives", type=int, default=1, help="how often both are started anew")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    words = "what is measured: by the clock, or of the processor where others load the machine"
    parser.add_argument("--time", choices=["clock", "processor"], default="clock", help=words)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for workload in given.workloads:
        row = compare(
            workload, given.old, given.new, given.lives, given.rounds, given.steps, given.time
        )
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
