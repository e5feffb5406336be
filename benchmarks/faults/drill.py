"""A hundred random moments of trouble: every run that is resumed must end with the same bits.

    python benchmarks/faults/drill.py --out benchmarks/faults/drill.jsonl

Kill -9 of one process and of all, SIGTERM, Ctrl-C, a full disk, a truncated file; with ``--more``
also a flipped bit, a second start on the same folder, a folder that becomes read-only, a clock that
is set back, SIGSTOP and SIGCONT, a kill within ``state_dict`` and ``evaluate``; all methods,
backward rules, corrections and averagings in turn; one process, a row of processes, replicas in one
process and in four. ``tests/drill_job.py`` does the work, ``tests/test_drill.py`` is the short
version.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from drill_job import FAULTS, MORE_FAULTS, make_plans  # noqa: E402

LAYOUTS = ((3, 1, False), (3, 1, True), (2, 2, False), (2, 2, True), (2, 1, True))
"""Stages, replicas, and whether each stage has a process of its own."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", help="only the moments of this fault")
    parser.add_argument("--more", action="store_true", help="the later faults beside the first six")
    parser.add_argument("--seconds", type=float, help="begins no moment after so long")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        given.out.unlink(missing_ok=True)
    faults = FAULTS + MORE_FAULTS if given.more else FAULTS
    plans = make_plans(given.moments, given.seed, LAYOUTS, faults)
    plans = [plan for plan in plans if given.fault in (None, plan["fault"])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(TESTS.parent / "src"), str(TESTS)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    reports: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TESTS / "drill_job.py"), folder, json.dumps(plans)]
        command += [] if given.seconds is None else [str(given.seconds)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                report = json.loads(line)
                reports.append(report)
                append(given.out, report)
                plan = report["plan"]
                print(
                    len(reports), plan["fault"], plan["method"], plan["processes"],
                    report["moment"], "differing:", report["differing"], flush=True,
                )  # fmt: skip
    summary = {
        "moments": len(reports),
        "differing": sum(report["differing"] != 0 for report in reports),
        "hung": sum(report["hung"] for report in reports),
        "left_behind": sum(report["left_behind"] for report in reports),
        "lost": sum(report["lost"] for report in reports),
        "faults": dict(Counter(report["plan"]["fault"] for report in reports)),
        "processes": dict(Counter(report["plan"]["processes"] for report in reports)),
    }
    print(json.dumps(summary, indent=1))
    append(given.out, {"summary": summary})


def append(place: Path | None, line: dict[str, Any]) -> None:
    """As it goes, so that a drill that is cut short has its results."""
    if place is not None:
        with place.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
