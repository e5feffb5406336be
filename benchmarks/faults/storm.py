"""A storm: faults at random moments on replicas that train, save, die, freeze and come back.

    python -m benchmarks.faults.storm --replicas 16 --part 1/14 --out benchmarks/faults/storm.jsonl

A storm is a list of *runs*: three seeds of DaSGD, DiLoCo, StreamingDiLoCo and two stages under
DaSGD, each beside a calm run of the same length, then runs in which those who let somebody in are
killed or frozen at that moment. ``--part`` takes a share of the list, so that each call is short
(a run takes ``--seconds``, and up to two minutes to begin and to end). Faults are a function of the
seed: a Poisson process of kill -9, freeze (SIGSTOP, then SIGCONT), partition (by ``wire.py``), and
a slow or full disk; in the first of the stormy runs everything is killed in the middle, and it goes
on from its checkpoint.

Needs torch, numpy and offbeat, no rights, nothing but loopback; it ends by itself.

    python -m benchmarks.faults.storm --summary benchmarks/faults/storm.jsonl
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from benchmarks.faults.wire import Wire
from benchmarks.stored import read_rows

Plan = dict[str, Any]
Row = dict[str, Any]
KINDS = {"kill": 10, "freeze": 5, "partition": 5, "slow disk": 2, "full disk": 2}
"""How often each kind of fault comes, in proportion."""
_QUIET = 0.1
"""Share of a run, at its beginning and at its end: what is hit last shall be back by then."""
_LIMIT_S = 120.0
"""Longer than its time no run may take to end."""
ADOPTIONS = ("donor killed", "all but the joiner killed", "donor frozen")
ROOT = Path(__file__).parents[2]


def plans_of(given: argparse.Namespace) -> list[Plan]:
    """All runs of a storm, in the order in which parts take them."""
    shared = {
        "replicas": given.replicas,
        "seconds": given.seconds,
        "silence": given.silence,
        "timeout": 60.0,
        "pause": given.pause,
        "save_every": 40,
        "evaluate_every": 100,
        "restart": 10_000,
        "stages": 1,
    }
    settings = [
        *({"averaging": "dasgd", "seed": given.seed + n} for n in range(3)),
        {"averaging": "diloco", "seed": given.seed},
        {"averaging": "streaming", "seed": given.seed},
        {"averaging": "dasgd", "seed": given.seed, "stages": 2, "replicas": given.replicas // 2},
    ]
    plans: list[Plan] = []
    for setting in settings:
        calm = shared | setting | {"storm": "calm", "faults": [], "whole_at": None, "wired": []}
        stormy = calm | {"storm": "storm"}
        if not plans:  # once in a storm everything is killed
            stormy["whole_at"] = given.seconds / 2
        stormy["faults"] = faults_of(stormy, given.rate)
        cut = {fault["replica"] for fault in stormy["faults"] if fault["kind"] == "partition"}
        stages = stormy["stages"]
        stormy["wired"] = sorted(r * stages + k for r in cut for k in range(stages))
        plans += [calm, stormy]
    for kind in ADOPTIONS:
        for repeat in range(given.adoptions):
            draw = random.Random(f"{kind}/{given.seed}/{repeat}")
            plan = shared | {"averaging": "dasgd", "seed": given.seed, "seconds": 45.0}
            plan |= {"storm": kind, "repeat": repeat, "whole_at": None, "wired": []}
            victim = draw.randrange(1, given.replicas)
            plan["faults"] = [{"at": 12.0, "kind": "kill", "replica": victim, "place": 0}]
            plan["then"] = {"joins": victim, "delay_s": draw.uniform(0.0, 0.4)}
            plans.append(plan)
    return plans


def faults_of(plan: Plan, per_hour: float) -> list[Row]:
    """Faults of a run, at moments in seconds since its beginning."""
    draw = random.Random(f"{plan['seed']}/{plan['averaging']}/{plan['stages']}")
    moment, faults = _QUIET * plan["seconds"], []
    last = plan["seconds"] - moment
    while (moment := moment + draw.expovariate(per_hour / 3600)) < last:
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        fault = {
            "at": round(moment, 2),
            "kind": kind,
            "replica": draw.randrange(plan["replicas"]),
            "place": draw.randrange(plan["stages"]),
        }
        if kind in ("freeze", "partition"):  # one in three ends before it counts as silence
            share = draw.uniform(0.2, 0.6) if draw.random() < 1 / 3 else draw.uniform(1.5, 3.0)
            fault["for_s"] = round(share * plan["silence"], 2)
        elif kind.endswith("disk"):
            fault["for_s"] = round(draw.uniform(3, 15), 2)
        faults.append(fault)
    return faults


# ------------------------------------------------------------------------- one run


class Run:
    """The processes of a plan, and what is done to them."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self._number = plan, folder, 0
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self.wire = Wire()
        self.wire.start()
        self._due: list[tuple[float, str, int]] = []
        """What ends when: a freeze of a process, a partition of a replica."""
        self._cut: dict[int, int] = defaultdict(int)
        self.done: list[Row] = []
        self._begun: set[int] = set()
        self.began: float | None = None
        """When all had begun to train; faults and the end of the run count from there."""
        self._starts()

    def _starts(self) -> None:
        plan = {**self.plan, "folder": str(self.folder), "run": self._number}
        file = self.folder / "plan.json"
        file.write_text(json.dumps(plan | {"wire": self.wire.port}))
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        more = {"OFFBEAT_STORM": self._mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths)}
        with (self.folder / "output").open("a") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.faults.storm_job", str(file)],
                env={**os.environ, **more}, cwd=ROOT, stdout=output, stderr=output,
            )  # fmt: skip

    def processes(self) -> dict[int, dict[str, str]]:
        """Those of this run, with their environment, wherever they have got to."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (place / "environ").read_bytes().split(b"\0")
                own = dict(w.decode(errors="replace").partition("=")[::2] for w in words)
                if own.get("OFFBEAT_STORM") == self._mark and int(place.name) != os.getpid():
                    found[int(place.name)] = own
        return found

    def pid_of(self, fault: Row) -> int | None:
        rank = fault["replica"] * self.plan["stages"] + fault["place"]
        return self.pids().get(rank)

    def pids(self) -> dict[int, int]:
        return {int(own["RANK"]): pid for pid, own in self.processes().items() if "RANK" in own}

    def diary(self) -> list[Row]:
        rows = [row for file in self.folder.glob("rank-*.jsonl") for row in self._lines(file)]
        return sorted(rows, key=lambda row: row["t"])

    def _lines(self, file: Path) -> list[Row]:
        rows, rank = [], int(file.stem[5:])
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # cut short by a kill
                rows.append(json.loads(line) | {"rank": rank})
        return rows

    # ---------------------------------------------------------------- trouble

    def strike(self, fault: Row) -> None:
        kind, pid = fault["kind"], self.pid_of(fault)
        now, hit = time.time(), pid is not None
        until = now + fault.get("for_s", 0.0)
        if kind == "kill" and pid is not None:
            os.kill(pid, signal.SIGKILL)
        elif kind == "freeze" and pid is not None:
            os.kill(pid, signal.SIGSTOP)
            self._due.append((until, "freeze", pid))
        elif kind == "partition":
            self._cut[fault["replica"]] += 1
            self._due.append((until, "partition", fault["replica"]))
            self._pull()
        elif kind.endswith("disk"):
            stages = self.plan["stages"]
            for rank in range(fault["replica"] * stages, (fault["replica"] + 1) * stages):
                (self.folder / f"disk-{rank}").write_text(f"{kind.split()[0]} {until}")
        self.done.append({**fault, "t": now, "hit": hit})

    def _pull(self) -> None:
        stages = self.plan["stages"]
        away = [replica for replica, count in self._cut.items() if count]
        self.wire.cut({r * stages + k for r in away for k in range(stages)})

    def mend(self) -> None:
        for due in [*self._due]:
            until, kind, what = due
            if time.time() >= until:
                self._due.remove(due)
                if kind == "partition":
                    self._cut[what] -= 1
                    self._pull()
                elif what in self.processes():
                    with suppress(ProcessLookupError):
                        os.kill(what, signal.SIGCONT)

    def kill_whole(self) -> Row:
        """The launcher and with it all; what is still there after half a minute was left behind."""
        now = time.time()
        self._child.kill()
        self._child.wait()
        self._due = [due for due in self._due if due[1] == "partition"]
        for pid in self.pids().values():  # whoever is frozen cannot notice
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        deadline = now + 30
        while self.processes() and time.time() < deadline:
            time.sleep(0.1)
        gone_s = round(time.time() - now, 2)
        left = self.end_all()
        self._number += 1
        self._starts()
        return {"t": now, "at": round(now - (self.began or now), 2), "left": left, "gone_s": gone_s}

    def end_all(self) -> int:
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)

    # ---------------------------------------------------------------- all of it

    def carry_out(self) -> Row:
        faults = sorted(self.plan["faults"], key=lambda fault: fault["at"])
        whole_at, then = self.plan["whole_at"], self.plan.get("then")
        whole, deadline = None, time.time() + _LIMIT_S
        while self._child.poll() is None and time.time() < deadline:
            if self.began is None:
                if self._all_train():
                    self.began = time.time()
                    ends = self.began + self.plan["seconds"]
                    deadline = ends + _LIMIT_S
                    (self.folder / "aside").write_text(str(ends))
                    (self.folder / "aside").rename(self.folder / "ends")
                time.sleep(0.2)
                continue
            at = time.time() - self.began
            if faults and at >= faults[0]["at"]:
                fault = faults.pop(0)
                if self._all_train():
                    self.strike(fault)
                else:  # started again as a whole: it has not begun
                    self.done.append({**fault, "t": time.time(), "hit": False})
            if whole_at is not None and at >= whole_at:
                whole, whole_at = self.kill_whole(), None
            if then is not None and self._knocks(then):
                time.sleep(then["delay_s"])
                self._strike_donors(then)
                then = None
            self.mend()
            time.sleep(0.05)
        hung = self._child.poll() is None
        if hung:
            for pid in self.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(2)
        self._child.kill() if hung else None
        self._child.wait()
        ended = time.time()
        while self.processes() and time.time() < ended + 5 and not hung:
            time.sleep(0.1)
        self.began = self.began or ended
        report = {"hung": hung, "left": self.end_all(), "whole": whole}
        self.wire.stop()
        return self._read(ended, whole) | report

    def _all_train(self) -> bool:
        """Whether everybody has begun since the whole was last started."""
        if self._number not in self._begun:
            ranks = range(self.plan["replicas"] * self.plan["stages"])
            files = [self.folder / f"rank-{rank}.jsonl" for rank in ranks]
            begun = (f.exists() and self._has_begun(self._lines(f)) for f in files)
            self._begun |= {self._number} if all(begun) else set()
        return self._number in self._begun

    def _has_begun(self, rows: list[Row]) -> bool:
        return any(row["what"] == "trains" and row["run"] == self._number for row in rows)

    def _knocks(self, then: Row) -> bool:
        file = self.folder / f"rank-{then['joins']}.jsonl"
        return file.exists() and any(row["what"] == "knocks" for row in self._lines(file))

    def _strike_donors(self, then: Row) -> None:
        others = [rank for rank in self.pids() if rank != then["joins"]]
        kind = self.plan["storm"]
        struck = others if kind.startswith("all") else [0]  # whose state is taken first
        for rank in struck:
            name = "freeze" if kind.endswith("frozen") else "kill"
            for_s = 10 * self.plan["silence"]
            self.strike({"kind": name, "replica": rank, "place": 0, "for_s": for_s})

    # ---------------------------------------------------------------- what it came to

    def _read(self, ended: float, whole: Row | None) -> Row:
        rows = self.diary()
        if whole is not None:
            killed = whole.pop("t")
            again = [r["t"] for r in rows if r["what"] == "merged" and r["t"] > killed]
            whole["down_s"] = round(min(again, default=ended) - killed, 1)
        numbers = range(self._number + 1)
        files = [self.folder / f"end-{number}.json" for number in numbers]
        ends = [json.loads(file.read_text()) for file in files if file.exists()]
        last: Row = {"error": "no report"}
        last = ends[-1] if ends and ends[-1]["run"] == self._number else last
        told: list[Any] = last.get("results", [])
        results: list[Row] = [one for one in told if one is not None]
        merges: dict[tuple[int, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if row["what"] == "merged" and row["at"][0] == 0:
                merges[tuple(row["at"])].append(row)
        parts = [max(len(row["senders"]) for row in same) for same in merges.values()]
        scores = {row["step"]: row["loss"] for row in rows if row["what"] == "scores"}
        return {
            "took_s": round(ended - (self.began or ended), 1),
            "ended": len(results),
            "error": last.get("error"),
            "step": max((result["step"] for result in results), default=None),
            "loss": max((result["loss"] for result in results), default=None),
            "digests": len({(result["digest"], result["step"]) for result in results}),
            "averages": len(parts),
            "parts": {str(n): parts.count(n) for n in sorted({*parts})},
            "disagreements": disagreements(rows),
            "adoptions": adoptions(rows),
            "saved": sum(row["what"] == "saves" and row["rank"] == 0 for row in rows),
            "unsaved": sum(row["what"] == "unsaved" and row["rank"] == 0 for row in rows),
            "returns": sum(row["what"] == "joined" for row in rows) // self.plan["stages"],
            "scores": scores,
            "faults": [self._outcome(fault, rows) for fault in self.done],
        }

    def _outcome(self, fault: Row, rows: list[Row]) -> Row:
        """When the others noticed a fault, and when its replica was back."""
        replica, stages = fault["replica"], self.plan["stages"]
        again = [f["t"] for f in self.done if f["replica"] == replica and f["t"] > fault["t"]]
        until = min(again, default=float("inf"))
        later = [row for row in rows if row["t"] > fault["t"]]
        told = (r["t"] for r in later if r["what"] == "gone" and r["replica"] == replica)
        noticed = next(told, None)
        names = ["kind", "replica", "hit", "for_s"]
        found: Row = {name: fault[name] for name in names if name in fault}
        found["at"] = round(fault["t"] - (self.began or 0.0), 2)
        if noticed is None or fault["kind"].endswith("disk") or noticed > until:
            return found
        found["noticed_s"] = round(noticed - fault["t"], 2)
        back = (
            r["t"] for r in later
            if r["what"] == "joined" and r["rank"] // stages == replica and r["t"] > noticed
        )  # fmt: skip
        first = next(back, None)
        if first is not None:
            found["back_s"] = round(first - fault["t"], 2)
        return found


def disagreements(rows: list[Row]) -> int:
    """Averages about which two processes of a run think differently who took part."""
    said: dict[tuple[Any, ...], set[tuple[int, ...]]] = defaultdict(set)
    for row in rows:
        if row["what"] == "merged":
            said[row["run"], *row["at"]].add(tuple(row["senders"]))
    return sum(len(different) > 1 for different in said.values())


def adoptions(rows: list[Row]) -> int:
    """Averages behind which weights were younger than before: somebody's fresh ones came in.

    The tracer falls with every update, in a process from one average to the next, and in one that
    has come back it must be as deep as in the others at the same average.
    """
    found = 0
    deepest: dict[tuple[int, ...], float] = {}
    at: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in rows:
        if row["what"] == "merged" and row["tracer"] is not None:
            whose = row["run"], row["rank"], row["life"]
            found += row["tracer"] > deepest.get(whose, 0.0) + 0.02
            deepest[whose] = min(deepest.get(whose, 0.0), row["tracer"])
            at[row["run"], *row["at"]].append(row["tracer"])
    return found + sum(max(same) - min(same) > 0.1 for same in at.values())


# ------------------------------------------------------------------------- what all came to


def machine() -> Row:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def setting_of(row: Row) -> str:
    return f"{row['plan']['averaging']}-{row['plan']['stages']}x{row['plan']['replicas']}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """What a page may say; shares and medians over all runs of a kind."""
    stormy = [row for row in rows if row["plan"]["storm"] == "storm"]
    calm = [row for row in rows if row["plan"]["storm"] == "calm"]
    found: dict[str, Any] = {
        "runs": len(rows),
        "faults": sum(fault["hit"] for row in rows for fault in row["faults"]),
        "hung": sum(row["hung"] for row in rows),
        "left": sum(row["left"] + ((row["whole"] or {}).get("left", 0)) for row in rows),
        "adoptions": sum(row["adoptions"] for row in rows),
        "disagreements": sum(row["disagreements"] for row in rows),
        "lost": sum(row["error"] is not None for row in stormy),
    }
    faults = [fault for row in stormy for fault in row["faults"]]
    for kind in ("kill", "freeze", "partition"):
        noticed = [f["noticed_s"] for f in faults if f["kind"] == kind and "noticed_s" in f]
        back = [f["back_s"] for f in faults if f["kind"] == kind and "back_s" in f]
        found[kind] = {
            "struck": sum(f["kind"] == kind and f["hit"] for f in faults),
            "noticed": len(noticed),
            "noticed_s": statistics.median(noticed) if noticed else None,
            "noticed_at_most_s": max(noticed, default=None),
            "back": len(back),
            "back_s": statistics.median(back) if back else None,
        }
    for row in stormy:
        beside = next(
            (c for c in calm if setting_of(c) == setting_of(row)
             and c["plan"]["seed"] == row["plan"]["seed"]), None,
        )  # fmt: skip
        replicas = row["plan"]["replicas"]
        counts = {int(n): count for n, count in row["parts"].items()}
        total = sum(counts.values())
        nearest = min(
            (beside["scores"] if beside else {}).items(),
            key=lambda one: abs(int(one[0]) - (row["step"] or 0)), default=(None, None),
        )  # fmt: skip
        found[f"{setting_of(row)}.{row['plan']['seed']}"] = {
            "averages": row["averages"],
            "of_calm": row["averages"] / beside["averages"] if beside else None,
            "down_s": (row["whole"] or {}).get("down_s", 0.0),
            "parts": sum(n * count for n, count in counts.items()) / total if total else None,
            "full": counts.get(replicas, 0) / total if total else None,
            "loss": row["loss"],
            "calm_loss": beside and beside["loss"],
            "calm_loss_there": nearest[1],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=480.0, help="of a run")
    parser.add_argument("--rate", type=float, default=125.0, help="faults an hour")
    parser.add_argument("--silence", type=float, default=5.0)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds after each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--adoptions", type=int, default=3, help="runs of each kind")
    parser.add_argument("--part", default="1/1", help="such as 2/14")
    parser.add_argument("--only", help="runs whose setting begins so, such as storm/diloco")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for what every process has noted")
    parser.add_argument("--summary", type=Path, help="runs nothing: sums up these rows")
    given = parser.parse_args()
    if given.summary is not None:
        print(json.dumps(summary(read_rows(given.summary)), indent=1))
        return
    part, parts = map(int, given.part.split("/"))
    plans = plans_of(given)
    names = [f"{plan['storm']}/{plan['averaging']}/{plan['stages']}" for plan in plans]
    mine = [
        (name, plan)
        for number, (name, plan) in enumerate(zip(names, plans, strict=True))
        if number * parts // len(plans) == part - 1 and name.startswith(given.only or "")
    ]
    for name, plan in mine:
        with tempfile.TemporaryDirectory(prefix="storm-") as aside:
            folder = Path(aside)
            if given.keep is not None:
                folder = given.keep / f"{name.replace('/', '-')}-{plan['seed']}"
                folder = folder.with_name(f"{folder.name}-{plan.get('repeat', 0)}")
                folder.mkdir(parents=True)
            run = Run(plan, folder)
            try:
                report = run.carry_out()
            finally:
                run.end_all()
        kept = {key: value for key, value in plan.items() if key != "faults"}
        row = {"plan": kept, **report, **machine(), "rate": given.rate}
        said = {key: value for key, value in row.items() if key not in ("plan", "scores")}
        print(name, plan["seed"], json.dumps(said), flush=True)
        if given.out is not None:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
