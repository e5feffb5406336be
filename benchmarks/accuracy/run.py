"""What staleness costs and what gives it back: CIFAR-10, one recipe, many ways, paired seeds.

All ways train the same network on the same batches in the same order from the same weights, with
one optimizer and schedule. Many runs share a GPU, a process each; every run is appended as it ends,
and a run that is there already is not run again.

    python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz parts
    python -m benchmarks.accuracy.run --data parts --stages 8 --out results.jsonl
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import time
import traceback
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from benchmarks.accuracy.configurations import WAYS
from benchmarks.averaging import mps
from benchmarks.averaging.data import Cifar
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import offbeat
from offbeat.zoo import resnet

MARGIN_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Job:
    way: str
    stages: int
    seed: int
    depth: int
    epochs: int
    rows: int
    batch: int
    lr: float
    momentum: float
    weight_decay: float
    bf16: bool

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def train(job: Job, data: Cifar, device: torch.device, until: float) -> dict[str, Any] | None:
    """One run; None if it could not end in time."""
    updates = job.epochs * (job.rows // job.batch)
    warm_up = updates // 10
    way = WAYS[job.way]

    def share(update: int) -> float:
        if update < warm_up:
            return (update + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (update - warm_up) / (updates - warm_up)))

    torch.manual_seed(job.seed)
    model = resnet(job.depth).to(device)
    if job.bf16:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def optimizer(params: Any) -> SGD:
        settings: dict[str, Any] = {"momentum": job.momentum, "weight_decay": job.weight_decay}
        if device.type == "cuda" and not way.corrections:
            lr = torch.tensor(job.lr, device=device)
            return SGD(params, lr=lr, fused=True, **settings)
        return SGD(params, lr=job.lr, **settings)

    trainer = offbeat.Trainer(
        model,
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=lambda made: LambdaLR(made, share),
        method=way.method(updates),
        corrections=list(way.corrections),
        stages=job.stages,
        seed=job.seed,
        autocast=torch.bfloat16 if job.bf16 else None,
        engine="streams" if device.type == "cuda" else "serial",
    )
    start, curve = time.monotonic(), []
    for epoch in range(job.epochs):
        for x, y in data.batches(job.batch, seed=job.seed, epoch=epoch):
            trainer.step(x.to(memory_format=torch.channels_last) if job.bf16 else x, y)
        if time.monotonic() > until:
            return None
        if epoch == job.epochs - 1:
            trainer.flush()
        found = trainer.evaluate(data.test)
        assert found.accuracy is not None
        curve.append([round(found.accuracy, 5), round(found.loss, 5)])
    return {
        "accuracy": curve[-1][0],
        "loss": curve[-1][1],
        "curve": curve,
        "lags": list(trainer.lags),
        "cuts": list(trainer.cuts or ()),
        "seconds": time.monotonic() - start,
    }


def work(data_folder: Path, device_name: str, rows: int, link: Connection, until: float) -> None:
    """What a process does: one job after the other."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    device = torch.device(device_name)
    data = Cifar(data_folder, device, rows=rows)
    link.send(None)
    while (job := link.recv()) is not None:
        try:
            link.send(train(job, data, device, until))
        except Exception as error:
            traceback.print_exc()
            link.send({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


def run(jobs: list[Job], arguments: argparse.Namespace, served: bool) -> None:
    """Hands jobs to processes until none is left or the time is up."""
    until = time.monotonic() + arguments.limit_s - MARGIN_S
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    context = multiprocessing.get_context("spawn")
    links: dict[Connection, Job | None] = {}
    processes = []
    for _ in range(min(arguments.parallel, len(jobs))):
        here, there = context.Pipe()
        settings = (arguments.data, arguments.device, arguments.rows, there, until)
        process = context.Process(target=work, args=settings, daemon=True)
        process.start()
        there.close()
        processes.append(process)
        links[here] = None
    where = {
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
        "python": platform.python_version(),
        "parallel": len(processes),
        "mps": served,
    }
    left = jobs[::-1]
    while links:
        ready = wait(list(links), max(0.0, until + 5.0 - time.monotonic()))
        if not ready:
            break
        for link in ready:
            assert isinstance(link, Connection)
            try:
                reply = link.recv()
            except EOFError:  # the process has died, and its job with it
                print("a process died with", links.pop(link), flush=True)
                continue
            job = links[link]
            if job is not None and reply is not None:
                _store(arguments.out, asdict(job) | reply | where)
            links[link] = left.pop() if left and time.monotonic() < until else None
            link.send(links[link])
            if links[link] is None:
                del links[link]
    for process in processes:
        process.join(2.0)
        process.kill()
    print(f"{len(left)} jobs were not started", flush=True)


def _store(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    what = row.get("error") or f"{100 * row['accuracy']:.2f} % in {row['seconds']:.0f} s"
    print(f"{row['way']}, K={row['stages']}, seed {row['seed']}: {what}", flush=True)


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that whatever the time allows is nearly a complete comparison."""
    patterns = [pattern.strip() for pattern in arguments.only.split(";")]
    names = [name for name in WAYS if any(fnmatch(name, pattern) for pattern in patterns)]
    if not names:
        raise SystemExit(f"--only {arguments.only}: there are {'; '.join(WAYS)}")
    known = set()
    if arguments.out.exists():
        fields = set(Job.__dataclass_fields__)
        for line in arguments.out.read_text().splitlines():
            row = json.loads(line)
            if "error" not in row:
                known.add(Job(**{name: row[name] for name in fields}).key)
    made = [
        Job(
            way=name,
            stages=stages,
            seed=seed,
            depth=arguments.depth,
            epochs=arguments.epochs,
            rows=arguments.rows,
            batch=arguments.batch,
            lr=lr,
            momentum=0.9,
            weight_decay=5e-4,
            bf16=arguments.bf16,
        )
        for seed in arguments.seeds
        for stages in arguments.stages
        for lr in arguments.lr
        for name in names
    ]
    return [job for job in made if job.key not in known]


def main() -> None:
    parser = argparse.ArgumentParser(description="What staleness costs in accuracy.")
    parser.add_argument("--data", type=Path, required=True, help="the folder that pack.py wrote")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), help="appended to")
    parser.add_argument("--only", default="*", help="as in 'BP;1F1B*'")
    parser.add_argument("--stages", type=int, nargs="+", default=[8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.1], help="for all alike")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=1e6)
    arguments = parser.parse_args()
    jobs = jobs_of(arguments)
    print(f"{len(jobs)} runs", flush=True)
    with mps.sharing(arguments.device.startswith("cuda")) as served:
        run(jobs, arguments, served)


if __name__ == "__main__":
    main()
