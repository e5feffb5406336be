"""What runs on each host: all contestants in turn, round by round and rate by rate.

One process per host stays alive, pinned to a core of its own. Its one argument is a job in JSON.
"""

import gc
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.slow_link.network import Host
from benchmarks.two_cores.worker import end_with_parent

WARM_UP = 3
FOREIGN_SHARE = {"real": 0.04, "sleep": 0.04}
REPEATS = 2
"""A turn in which others took more of any host's core is repeated, at most so often."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Readings:
    """Clocks of this process and of its core."""

    def __init__(self, core: int) -> None:
        times = os.times()
        self.cpu_s = time.process_time()
        self._own_s = times.user
        lines = Path("/proc/stat").read_text().splitlines()
        (words,) = (line.split()[1:9] for line in lines if line.startswith(f"cpu{core} "))
        user, nice, system, _, _, irq, soft, stolen = (_TICK_S * int(word) for word in words)
        self.core_s = user + nice + system + irq + soft
        # The kernel's part in sending is no program's, and nobody's fault.
        self._programs_s = user + nice + stolen

    def foreign_share(self, before: "Readings", seconds: float) -> float:
        """What other programs, and other machines on this one's hardware, took of the core."""
        programs_s = self._programs_s - before._programs_s
        return max(0.0, (programs_s - (self._own_s - before._own_s)) / seconds)


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    end_with_parent()
    os.sched_setaffinity(0, {job["core"]})

    # Imported only now: threads that torch starts inherit the core of this process.
    import torch
    import torch.distributed as dist
    from benchmarks.slow_link.contestants import SPECS, Contestant, Work, build

    from offbeat.averaging import AllReduce

    torch.set_num_threads(1)
    host, work = Host(**job["host"]), Work(**job["work"])
    quiet = FOREIGN_SHARE[work.compute]
    dist.init_process_group("gloo")

    def set_rate(mbit: float | None) -> None:
        dist.barrier()
        host.limit(mbit)
        dist.barrier()

    updates: dict[str, int] = {}

    def run(contestant: Contestant, steps: int) -> list[float]:
        """Trains; returns when each step ended, beginning with the start."""
        ends = [time.perf_counter()]
        for _ in range(steps):
            contestant.step()
            ends.append(time.perf_counter())
        name = contestant.spec.name
        updates[name] = updates.get(name, 0) + steps
        return ends

    def take_turn(contestant: Contestant) -> dict[str, Any]:
        spec = contestant.spec
        # Whole rounds are timed, from right after one start of an average to right after another.
        steps = job["steps"]
        if spec.kind not in ("alone", "offbeat") or spec.averaging == AllReduce(exact=False):
            steps = max(2, steps // 2)  # every step is like the other
        dist.barrier()
        run(contestant, max(spec.every, 2))
        first = updates[spec.name]
        before = Readings(job["core"])
        ends = run(contestant, steps)
        after = Readings(job["core"])
        contestant.settle()
        return {
            "first": first,
            "step_s": [round(b - a, 6) for a, b in pairwise(ends)],
            "cpu_s": round(after.cpu_s - before.cpu_s, 6),
            "core_s": round(after.core_s - before.core_s, 6),
            "foreign_share": round(after.foreign_share(before, ends[-1] - ends[0]), 4),
        }

    def take_quiet_turn(contestant: Contestant) -> dict[str, Any]:
        repeats = 0
        while True:
            turn = take_turn(contestant)
            if most_of_all(turn["foreign_share"]) <= quiet or repeats == REPEATS:
                return turn | {"repeats": repeats}
            repeats += 1
            time.sleep(1.0)  # whoever it is may be done by then

    def most_of_all(number: float) -> float:
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    set_rate(None)
    contestants = [build(spec, work) for spec in SPECS]
    for contestant in contestants:
        run(contestant, max(WARM_UP, contestant.spec.every))
        contestant.settle()
    # The unit of all ratios takes two turns in each round.
    contestants.insert(len(contestants) // 2 + 1, contestants[0])
    gc.collect()
    gc.freeze()  # later collections need not look at all of torch again
    turns, began = [], time.monotonic()
    for number in range(job["rounds"]):
        for mbit in job["rates"]:
            set_rate(mbit)
            shift = number % len(contestants)
            for contestant in contestants[shift:] + contestants[:shift]:
                turn = take_quiet_turn(contestant)
                turns.append({"round": number, "mbit": mbit, "name": contestant.spec.name, **turn})
            if host.rank == 0:
                print(_progress(turns, number, mbit), flush=True)
        if most_of_all(time.monotonic() - began) > 60 * job["minutes"]:
            break
    set_rate(None)
    averages = {c.spec.name: _averages(c.trainer.ledger) for c in contestants if c.trainer}
    found = {"turns": turns, "averages": averages, "torch": torch.__version__}
    Path(job["out"]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # no goodbyes: the network goes down as a whole


def _averages(ledger: Any) -> list[list[float]]:
    """Per average: replica, version at its start, when it was sent, when it arrived, the wait."""
    waits: dict[int, dict[int, float]] = {}
    rows = []
    for entry in ledger:
        if entry.kind == "A":
            if entry.replica not in waits:
                waits[entry.replica] = ledger.waits(0, entry.replica)
            wait = waits[entry.replica].get(entry.batch, 0.0)
            times = [round(s, 6) for s in (entry.start_s, entry.end_s, wait)]
            rows.append([entry.replica, entry.batch, *times])
    return rows


def _progress(turns: list[dict[str, Any]], number: int, mbit: float) -> str:
    means = {
        turn["name"]: sum(turn["step_s"]) / len(turn["step_s"])
        for turn in turns
        if (turn["round"], turn["mbit"]) == (number, mbit)
    }
    alone = means["alone"]
    words = ", ".join(
        f"{name} {mean / alone:.3f}" for name, mean in sorted(means.items()) if name != "alone"
    )
    return f"round {number + 1}, {mbit:g} Mbit/s: alone {1000 * alone:.1f} ms; times that: {words}"


if __name__ == "__main__":
    main()
