"""What staleness costs a small GPT and what gives it back: validation loss against BP.

All ways of a seed train the same model on the same batches in the same order from the same weights,
with one optimizer and schedule. The models of several seeds are trained as one (ensemble.py), many
runs share a GPU, every run is appended as it ends, and a run that is there already is not run
again. Learning rates are those of the stored runs of the set "tune" with the lowest loss.

    python -m benchmarks.language.pack /work/shared/data/enwik8/enwik8.xz enwik8
    python -m benchmarks.language.run --data enwik8 --only tune target --limit-s 200
"""

import argparse
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from benchmarks import mps
from benchmarks.language.configurations import BASELINE, OPTIMIZERS, SETS, TUNE, WAYS
from benchmarks.language.data import Text
from benchmarks.language.rates import best_rates
from benchmarks.language.training import Job, train
from benchmarks.pool import Pool, Run, Store, need
from benchmarks.stored import Row, read_rows

Rates = dict[str, float]


# ------------------------------------------------------------------------- processes


def prepared(folder: Path, device_name: str, until: float) -> Run:
    """What trains a job in one of the processes."""
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    text = Text(folder, device)
    return lambda job: train(job, text, device, until)


def line(row: Row) -> str:
    """A run in a few words."""
    what = row.get("error") or f"{row['losses']}, {row['ms_per_update']} ms an update"
    return f"{row['way']}, {row['optimizer']} {row['lr']:g}, seeds {row['seeds']}: {what}"


# ------------------------------------------------------------------------- jobs


def rows_in(path: Path) -> list[Row]:
    """Runs that ended; those with an error are to be run again."""
    return [row for row in read_rows(path) if "error" not in row] if path.exists() else []


def tuning_jobs(arguments: argparse.Namespace, optimizers: Iterable[str]) -> list[Job]:
    return [
        _job(arguments, range(SETS[TUNE].seeds), BASELINE, optimizer, lr)
        for optimizer in optimizers
        for lr in OPTIMIZERS[optimizer].rates
    ]


def rates_known(rows: Iterable[Row], tuning: Iterable[Job]) -> Rates:
    """The best rate of each optimizer of which all ``tuning`` runs are stored."""
    stored = {Job.of(row).key: row for row in rows}
    missing = {job.optimizer for job in tuning if job.key not in stored}
    best = best_rates([stored[job.key] for job in tuning if job.key in stored])
    return {optimizer: rate for optimizer, rate in best.items() if optimizer not in missing}


def jobs_of(arguments: argparse.Namespace, name: str, rates: Rates) -> list[Job]:
    patterns = [pattern.strip() for pattern in arguments.ways.split(";")]
    chosen = [
        comparison
        for comparison in SETS[name].comparisons
        if comparison.optimizer in arguments.optimizers
        and comparison.optimizer in rates
        and (comparison.way == BASELINE or any(fnmatch(comparison.way, p) for p in patterns))
    ]
    seeds = arguments.seeds or range(SETS[name].seeds)
    return [
        _job(arguments, seeds, one.way, one.optimizer, share * rates[one.optimizer])
        for one in chosen
        for share in ((1.0,) if one.way == BASELINE else SETS[name].rates)
    ]


def _job(
    arguments: argparse.Namespace, seeds: Iterable[int], way: str, optimizer: str, lr: float
) -> Job:
    return Job(
        way=way,
        optimizer=optimizer,
        lr=lr,
        seeds=tuple(seeds),
        updates=arguments.updates,
        rows=arguments.rows,
        context=arguments.context,
        width=arguments.width,
        precision=arguments.precision,
        text=arguments.data.resolve().name,
        dropout=arguments.dropout,
    )


def new_ones(jobs: Iterable[Job], rows: Iterable[Row]) -> list[Job]:
    """Each once, and none that is stored."""
    known = {Job.of(row).key for row in rows}
    return [job for job in {job.key: job for job in jobs}.values() if job.key not in known]


def _longest_first(job: Job) -> tuple[int, int]:
    way = WAYS[job.way]
    return -way.micro_batches, -way.stages


# ------------------------------------------------------------------------- the command


def run(arguments: argparse.Namespace, served: bool) -> None:
    pool = Pool(
        partial(prepared, arguments.data, arguments.device),
        Store(arguments, served, line),
        parallel=arguments.parallel,
        limit_s=arguments.limit_s,
    )
    tuning = tuning_jobs(arguments, arguments.optimizers)
    try:
        if TUNE in arguments.only:
            pool.finish(new_ones(tuning, rows_in(arguments.out)))
        rows = rows_in(arguments.out)
        rates = rates_known(rows, tuning) | arguments.lr
        print("learning rates:", rates, flush=True)
        unknown = set(arguments.optimizers) - set(rates)
        if unknown:
            print(f"left out, --only {TUNE} or --lr first: {', '.join(unknown)}", flush=True)
        sets = [name for name in arguments.only if name != TUNE]
        jobs = new_ones((job for name in sets for job in jobs_of(arguments, name, rates)), rows)
        jobs.sort(key=_longest_first)
        print(f"{len(jobs)} runs", flush=True)
        pool.finish(jobs)
    finally:
        pool.close()


def _rates(words: list[str]) -> Rates:
    pairs = [word.rpartition("=") for word in words]
    return {name: float(value) for name, _, value in pairs}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="What staleness costs a small GPT.")
    made.add_argument(
        "--data", type=Path, required=True,
        help="the folder that pack.py wrote; its name is stored as that of the text",
    )  # fmt: skip
    made.add_argument("--out", type=Path, default=Path("results.jsonl"), help="appended to")
    made.add_argument(
        "--only", nargs="+", choices=SETS, default=[TUNE, "target", "lag", "curve"],
        help="sets of runs, the most important first",
    )  # fmt: skip
    made.add_argument("--ways", default="*", help="of these sets, as in '1F1B*'; BP always")
    made.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    made.add_argument("--lr", nargs="+", default=[], help="not the tuned ones: 'adamw=0.002'")
    made.add_argument(
        "--seeds", type=int, nargs="+", help="trained as one; by default as many as the set has"
    )
    made.add_argument("--updates", type=int, default=1500)
    made.add_argument("--rows", type=int, default=32, help="per update")
    made.add_argument("--context", type=int, default=64)
    made.add_argument("--width", type=int, default=128)
    made.add_argument("--dropout", type=float, default=0.0)
    made.add_argument("--precision", choices=("bf16", "tf32", "fp32"), default="tf32")
    made.add_argument("--device", default="cuda")
    made.add_argument("--parallel", type=int, default=6)
    made.add_argument("--limit-s", type=float, default=1e6)
    return made


def main() -> None:
    arguments = parser().parse_args()
    need(arguments.device, arguments.data, instead="--device cpu tries it out.")
    arguments.lr = _rates(arguments.lr)
    with mps.sharing(arguments.device.startswith("cuda")) as served:
        run(arguments, served)


if __name__ == "__main__":
    main()
