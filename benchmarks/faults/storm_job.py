"""What the processes of a storm do: train a small GPT, save all the time, note what they see.

    python -m benchmarks.faults.storm_job FOLDER/plan.json

Started by ``storm.py``, which kills, freezes and cuts off. A process that comes back begins with
the weights a run begins with (it is refused with any others), and weights travel with a tracer: a
number that falls with every update, at the same pace in all replicas. Where first weights become
anybody's state, it jumps back.
"""

import errno
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.faults.wire import Wired, ask
from torch import Tensor, nn

import offbeat
from offbeat.averaging import Averaging, DaSGD, DiLoCo, StreamingDiLoCo
from offbeat.averaging.averager import Averager
from offbeat.checkpoints import writer
from offbeat.elastic.membership import Membership
from offbeat.elastic.restarts import return_number
from offbeat.engines import launcher
from offbeat.engines.feed import checksum_of
from offbeat.errors import CheckpointError
from offbeat.transport.gloo import Gloo
from offbeat.transport.link import End
from offbeat.transport.mailbox import Mailbox
from offbeat.zoo.gpt import gpt

Plan = dict[str, Any]
VOCABULARY, CONTEXT, WIDTH, ROWS, LR = 32, 16, 32, 4, 2e-3
AVERAGINGS: dict[str, Averaging] = {
    "dasgd": DaSGD(every=4, delay=1),
    "diloco": DiLoCo(every=8),
    "streaming": StreamingDiLoCo(every=8, fragments=2, delay=1),
}


class Traced(nn.Module):
    """A last layer with a number beside it that says how old the weights are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.tracer = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + 0.0 * self.tracer


def falls(named: list[tuple[str, nn.Parameter]]) -> Tensor:
    """A penalty of slope 1 on tracers: Adam lets them fall by the learning rate every update."""
    found = [value.sum() for name, value in named if name.endswith("tracer")]
    return found[0] if found else torch.zeros(())


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = list(gpt(VOCABULARY, CONTEXT, layers=2, width=WIDTH, heads=2))
    return nn.Sequential(*layers[:-1], Traced(layers[-1]))


def text(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a language in which each word mostly follows from the last two."""
    while True:
        draw = torch.Generator().manual_seed(seed)
        seed += 1
        rows = torch.randint(VOCABULARY, (256, CONTEXT + 1), generator=draw)
        noise = torch.rand(rows.shape, generator=draw) < 0.1
        for place in range(2, CONTEXT + 1):
            follows = (3 * rows[:, place - 1] + 5 * rows[:, place - 2] + 1) % VOCABULARY
            rows[:, place] = torch.where(noise[:, place], rows[:, place], follows)
        yield rows[:, :-1], rows[:, 1:]


def batches(plan: Plan, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same rows in every process; those of the steps before ``start`` have been had."""
    rows, step = plan["replicas"] * ROWS, 0
    for x, y in text(plan["seed"] * 100_000):
        for first in range(0, 256 - rows + 1, rows):
            if step >= start:
                yield x[first : first + rows], y[first : first + rows]
            step += 1


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


# ------------------------------------------------------------------------- one process


class Diary(logging.Handler):
    """What a process has seen, line by line in a file that outlives it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._file = (Path(plan["folder"]) / f"rank-{os.environ['RANK']}.jsonl").open("a")
        self.known = {"run": plan["run"], "life": return_number()}

    def note(self, what: str, **more: Any) -> None:
        row = {"t": time.time(), "what": what, **self.known, **more}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def emit(self, record: logging.LogRecord) -> None:
        for what in ("gone", "back"):
            found = re.search(rf"replica (\d+) is {what}", record.getMessage())
            if found:
                self.note(what, replica=int(found[1]), words=record.getMessage()[:300])


def look_at_averages(diary: Diary) -> None:
    """Notes every average when it is merged: how many took part, and the tracer behind it."""
    parts: dict[Any, tuple[int, ...]] = {}
    put, merge = Mailbox.put, Averager._merge

    def put_noted(self: Mailbox, key: Any, gathered: Any) -> None:
        if key.what == "weights":
            parts[key] = tuple(gathered.senders or range(gathered.replicas))
        put(self, key, gathered)

    def merge_noted(self: Averager, task: Any) -> None:
        merge(self, task)
        if task.what == "weights" and task.arrives:
            own = [value for value in self._trainable if value.numel() == 1]
            tracer = round(float(own[0].detach()), 6) if own else None
            senders = parts.pop(self._key(task), ())
            at = [self._stage.index, task.number, task.fragment]
            diary.note("merged", at=at, senders=senders, tracer=tracer)

    Mailbox.put = put_noted  # type: ignore[method-assign]
    Averager._merge = merge_noted  # type: ignore[method-assign]


def look_at_returns(diary: Diary) -> None:
    """Notes when a process that comes back knocks, and when it has been let in."""
    knock, join = Membership._knock, Membership.join

    def knock_noted(self: Membership, *args: Any) -> Any:
        diary.note("knocks")
        return knock(self, *args)

    def join_noted(self: Membership) -> Any:
        found = join(self)
        diary.note("joined", step=found[0].step)
        return found

    Membership._knock = knock_noted  # type: ignore[method-assign, assignment]
    Membership.join = join_noted  # type: ignore[method-assign]


def trouble_the_disk(plan: Plan) -> None:
    """A hook in front of every file of a checkpoint: slow, or full, while a note says so."""
    control, write = Path(plan["folder"]) / f"disk-{os.environ['RANK']}", writer._write_file

    def write_hooked(path: Path, value: Any) -> Any:
        try:
            kind, until = control.read_text().split()
        except (FileNotFoundError, ValueError):
            kind, until = "", "0"
        if time.time() < float(until):
            if kind == "full":
                path.write_bytes(b"cut short")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            time.sleep(1.0)
        return write(path, value)

    writer._write_file = write_hooked


def lead_over_the_wire(plan: Plan) -> None:
    """Connections with ranks that will be cut off lead through the proxy."""
    if not plan["wired"]:
        return
    start, rank = Gloo.__init__, int(os.environ["RANK"])

    def start_wired(self: Gloo, end: End) -> None:
        store = Wired(end.store, plan["wire"], rank, plan["wired"])
        start(self, replace(end, store=store))

    Gloo.__init__ = start_wired  # type: ignore[method-assign]


def train(plan: Plan) -> dict[str, Any]:
    """What a user writes, in every process."""
    diary = Diary(plan)
    file = (Path(plan["folder"]) / f"stacks-{os.environ['RANK']}").open("a")
    faulthandler.register(signal.SIGUSR1, file=file)
    diary.note("starts", pid=os.getpid())
    logging.getLogger("offbeat").addHandler(diary)
    look_at_averages(diary)
    look_at_returns(diary)
    trouble_the_disk(plan)
    lead_over_the_wire(plan)
    try:
        return follow(plan, diary)
    except BaseException as error:
        diary.note("fails", words=f"{type(error).__name__}: {error}"[:400])
        raise


def follow(plan: Plan, diary: Diary) -> dict[str, Any]:
    trainer = offbeat.Trainer(
        network(plan["seed"]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0),
        method=offbeat.StaleWeights() if plan["stages"] > 1 else offbeat.Synchronous(),
        stages=plan["stages"],
        replicas=plan["replicas"],
        averaging=AVERAGINGS[plan["averaging"]],
        penalty=falls,
        seed=plan["seed"],
        timeout=plan["timeout"],
        when_replica_dies="go on",
        machines=offbeat.Machines(silence=plan["silence"]),
    )
    place = Path(plan["folder"]) / "checkpoints"
    start = 0 if trainer.behind else trainer.resume(place).step
    held_out = [next(text(99)) for _ in range(1)]
    held_out = [(x[: 8 * plan["replicas"]], y[: 8 * plan["replicas"]]) for x, y in held_out]
    diary.note("trains", step=start)
    began, ends = time.monotonic(), None
    for steps, (x, y) in enumerate(trainer.batches(batches(plan, start)), 1):
        trainer.step(x, y)
        step = trainer._pipeline.position.step
        time.sleep(plan["pause"])
        if ends is None and (Path(plan["folder"]) / "ends").exists():
            ends = float((Path(plan["folder"]) / "ends").read_text())
        if step % plan["save_every"] == 0:
            save(trainer, place, step, diary)
        if step % plan["evaluate_every"] == 0:
            score = trainer.evaluate(held_out).loss
            diary.note("scores", step=step, loss=round(score, 5))
        over = ends is not None and time.time() > ends
        if trainer.stop_together(over, steps / (time.monotonic() - began)):
            break
    trainer.flush()
    end = trainer.evaluate(held_out).loss
    state = trainer.state_dict()
    try:
        trainer.finish_saving()
    except CheckpointError as error:
        diary.note("unsaved", words=str(error)[:200])
    step = trainer._pipeline.position.step
    diary.note("ends", step=step, loss=round(end, 5))
    return {"digest": checksum_of([*state.values()]), "step": step, "loss": end}


def save(trainer: offbeat.Trainer, place: Path, step: int, diary: Diary) -> None:
    try:
        trainer.save(place, drain=True, keep=2)
        diary.note("saves", step=step)
    except CheckpointError as error:
        diary.note("unsaved", step=step, words=str(error)[:200])


# ------------------------------------------------------------------------- all of them


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    start = launcher._start

    def start_wired(size: int, port: int, threads: int, folder: Path, rank: int, more: Any) -> Any:
        if rank in plan["wired"]:  # to the store, too, it goes over the wire
            port = ask(plan["wire"], {"to": port, "rank": rank, "wired": plan["wired"]})
        return start(size, port, threads, folder, rank, more)

    launcher._start = start_wired
    size = plan["replicas"] * plan["stages"]
    report: dict[str, Any] = {"run": plan["run"]}
    try:
        found = offbeat.launch(train, size, plan, go_on=True, restart=plan["restart"])
        report["results"] = found
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"[:400]
    aside = Path(plan["folder"]) / f"aside-{plan['run']}"
    aside.write_text(json.dumps(report))
    aside.rename(Path(plan["folder"]) / f"end-{plan['run']}.json")


if __name__ == "__main__":
    main()
