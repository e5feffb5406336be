"""Accuracy of averaging methods on CIFAR-10: the same samples, eight replicas in one process.

Many small runs share one GPU, a process each. Every run is appended to the results as it ends, and
a run that is there already is not run again.

    python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz parts
    python -m benchmarks.averaging.run --data parts --out benchmarks/averaging/results.jsonl
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from benchmarks import mps
from benchmarks.averaging.configurations import CONFIGURATIONS
from benchmarks.averaging.data import PARTS, Cifar, parts_in, rows_in
from benchmarks.averaging.summary import key_of, table
from benchmarks.averaging.training import Job, Setting, train
from benchmarks.pool import Pool, Run, Store, need
from benchmarks.stored import Row, read_rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="What averaging less often, or later, costs.")
    made.add_argument("--data", type=Path, required=True, help="the folder that pack.py wrote")
    made.add_argument("--out", type=Path, default=Path("results.jsonl"), help="appended to")
    made.add_argument("--device", default="cuda")
    made.add_argument("--parallel", type=int, default=14, help="processes")
    made.add_argument("--limit-s", type=float, default=1e6, help="for everything")
    made.add_argument("--only", default="*", help="as in 'AllReduce;DaSGD(4*'")
    made.add_argument("--seeds", type=int, default=3, help="0, 1, ...")
    made.add_argument("--lr", type=float, nargs="+", default=[0.2], help="peak, for all alike")
    made.add_argument("--epochs", type=int, default=4)
    made.add_argument("--rows", type=int, default=None, help="the first N training images")
    made.add_argument("--test-rows", type=int, default=10_000)
    made.add_argument("--replicas", type=int, default=8)
    made.add_argument("--rows-per-replica", type=int, default=64)
    made.add_argument("--model", default="20", help="depth of the ResNet, or cnn")
    made.add_argument("--bf16", action="store_true", help="autocast")
    made.add_argument("--channels-last", action="store_true")
    return made


def prepared(folder: Path, device_name: str, setting: Setting, until: float) -> Run:
    """What trains a job in one of the processes."""
    device = torch.device(device_name)
    data = Cifar(folder, device, rows=setting.rows, test_rows=setting.test_rows)
    return lambda job: train(job, data, device, until)


def line(row: Row) -> str:
    """A run in a few words."""
    what = row.get("error") or (
        f"{row['accuracy']:.2%}, replica 0 {row['replica_accuracy']:.2%} ({row['seconds']:.0f} s)"
    )
    return f"seed {row['seed']}  {row['configuration']}: {what}"


def setting_of(arguments: argparse.Namespace) -> Setting:
    there = parts_in(arguments.data)
    rows = rows_in(arguments.data)
    if len(there) < PARTS["train"]:
        print(f"only parts {there} of {PARTS['train']}: {rows} training images", flush=True)
    setting = Setting(
        model=arguments.model,
        rows=rows if arguments.rows is None else min(rows, arguments.rows),
        test_rows=arguments.test_rows,
        epochs=arguments.epochs,
        replicas=arguments.replicas,
        rows_per_replica=arguments.rows_per_replica,
        momentum=0.9,
        weight_decay=5e-4,
        autocast=arguments.bf16,
        channels_last=arguments.channels_last,
    )
    if setting.rows < setting.batch:
        raise SystemExit(f"{setting.rows} training images make no batch of {setting.batch}.")
    return setting


def jobs_of(arguments: argparse.Namespace, setting: Setting) -> list[Job]:
    """Seed by seed, so that whatever the time allows is a complete comparison or nearly."""
    patterns = arguments.only.split(";")
    names = [n for n in CONFIGURATIONS if any(fnmatch(n, p.strip()) for p in patterns)]
    if not names:
        raise SystemExit(f"--only {arguments.only}: there are {'; '.join(CONFIGURATIONS)}")
    return [
        Job(configuration=name, seed=seed, lr=lr, setting=setting)
        for seed in range(arguments.seeds)
        for lr in arguments.lr
        for name in names
    ]


def new_ones(jobs: Iterable[Job], out: Path) -> list[Job]:
    """Those that are not stored."""
    known = {key_of(row) for row in ended(out)}
    return [job for job in jobs if key_of(asdict(job)) not in known]


def ended(out: Path) -> list[Row]:
    """Runs with a result; those with an error are to be run again."""
    return [row for row in read_rows(out) if "error" not in row] if out.exists() else []


def main() -> None:
    arguments = parser().parse_args()
    need(arguments.device, arguments.data, instead="--device cpu tries it out.")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    setting = setting_of(arguments)
    jobs = new_ones(jobs_of(arguments, setting), arguments.out)
    print(f"{len(jobs)} runs", flush=True)
    with mps.sharing(arguments.device.startswith("cuda")) as served:
        pool = Pool(
            partial(prepared, arguments.data, arguments.device, setting),
            Store(arguments, served, line),
            parallel=min(arguments.parallel, len(jobs)),
            limit_s=arguments.limit_s,
        )
        try:
            pool.finish(jobs)
        finally:
            pool.close()
    print(table(ended(arguments.out)))


if __name__ == "__main__":
    main()
