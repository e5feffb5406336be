"""Stored runs made up for the report, and its page taken apart."""

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from offbeat.app.report.timelines import planned_entries
from offbeat.app.runs import LEDGER, SUMMARY, Run, RunWriter
from offbeat.methods import Method, method_named
from offbeat.records.ledger import Ledger, lags_of
from offbeat.schedules.timeline import Costs, timeline

STAGES, EPOCHS, EPOCH_STEPS = 4, 3, 20


def made_ledger(
    method: Method, steps: int, replicas: int = 1, share: Sequence[float] = ()
) -> Ledger:
    """The planned order of work, 10 ms a forward; with replicas also averages.

    ``share``: weighs the stages.
    """
    costs = Costs(share=share)
    ledger = Ledger()
    for replica in range(replicas):
        for e in planned_entries(timeline(method, STAGES, steps=steps, costs=costs)):
            start, end = e.start_s / 100, e.end_s / 100
            loss = 2.5 if (e.kind, e.stage) == ("F", STAGES - 1) else None
            ledger.record(e.kind, e.stage, e.batch, e.version, start, end, loss, replica)
            if replicas > 1 and e.kind == "U":
                ledger.record("A", e.stage, e.batch, e.version, end, end + 0.005, None, replica)
                ledger.record("M", e.stage, e.batch, e.version, end + 0.004, end + 0.006, None, 0)
    return ledger


def made_run(
    folder: Path,
    method: str = "stale-weights",
    *,
    accuracy: float | None = 0.9,
    replicas: int = 1,
    steps: int = 12,
    share: Sequence[float] = (),
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """A finished run with every part that a run can have."""
    built = method_named(method, **settings)
    words = {
        "model": {"name": "digits-cnn", "settings": {"width": 16}},
        "method": {"name": method, "settings": settings},
        "averaging": {"name": "dasgd", "settings": {"every": 4}} if replicas > 1 else None,
        "replicas": replicas,
        "stages": STAGES,
        "lags": list(built.lags(STAGES)),
        "optimizer": {"name": "sgd", "lr": 0.02},
        "command": "offbeat train",
        "versions": {"offbeat": "0.2", "torch": "2.13"},
    }
    ledger = made_ledger(built, steps, replicas, share)
    writer = RunWriter(folder, words | (config or {}))
    total = EPOCHS * EPOCH_STEPS
    for step in range(1, total + 1):
        at = {"step": step, "epoch": step / EPOCH_STEPS, "time_s": step * 0.5}
        writer.add("step", **at, loss=2.0 / step, rows_per_s=128.0, lr=0.02)
        if step % EPOCH_STEPS == 0:
            reached = None if accuracy is None else accuracy * step / total
            writer.add("evaluation", **at, loss=1 / step, accuracy=reached, rows=359, of="average")
    writer.add("end", step=total, epoch=EPOCHS, time_s=total * 0.5, status="finished")
    counts: dict[str, dict[str, int]] = {}
    for (_, stage, _), lag in lags_of(ledger).items():
        of_stage = counts.setdefault(str(stage), {})
        of_stage[str(lag)] = of_stage.get(str(lag), 0) + 1
    memory = {"weight_copies": 1, "peak_weight_copies": 2, "graphs": 3, "inputs": 0}
    memory |= {"peak_in_flight": 4, "weight_bytes": 2_000_000, "in_flight_bytes": 500_000}
    memory |= {"correction_bytes": 1_000_000}
    wait = {"averages": 7, "total_s": 0.25, "longest_s": 0.125}
    places = [f"{replica}/{stage}" for replica in range(replicas) for stage in range(STAGES)]
    summary = {
        "status": "finished",
        "steps": total,
        "epochs": EPOCHS,
        "time_s": total * 0.5,
        "loss": 0.3125,
        "accuracy": accuracy,
        "rows_per_s": 256.0,
        "lags": counts,
        "memory": [memory] * (STAGES * replicas),
        "waits": dict.fromkeys(places, wait) if replicas > 1 else {},
        "busy_share": [0.5, 0.25, 0.75, 1.0],
    }
    writer.finish({LEDGER: ledger.save}, lambda: None, summary)
    return Run.load(folder)


def changed(run: Run, file: str, **values: Any) -> Run:
    """The run with keys of one of its JSON files replaced; None takes a key away."""
    path = run.folder / file
    kept = {**json.loads(path.read_text()), **values, "digest": None}
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    return Run.load(run.folder)


class Seen(HTMLParser):
    """Elements and text of a page, as a browser would take it apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("script", "style"):
            self.words += data.replace("\xa0", " ")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def hostile_run(folder: Path) -> Run:
    name = '"><img src=x onerror=alert(1)>$x_{&quot;'
    config = {
        "model": {"name": HOSTILE},
        HOSTILE: HOSTILE,
        "command": [HOSTILE, {HOSTILE: [HOSTILE]}],
        "method": {"name": HOSTILE, "settings": {HOSTILE: HOSTILE}},
        "averaging": {"name": HOSTILE},
    }
    run = made_run(folder / name, replicas=2, config=config)
    return changed(run, SUMMARY, status=HOSTILE)
