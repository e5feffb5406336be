"""What staleness costs in accuracy and what gives it back: one recipe, many ways, paired seeds.

All ways of a seed train the same network on the same batches in the same order from the same
weights, with one optimizer and schedule. The networks of several seeds are trained as one
(ensemble.py), several runs share a GPU, every run is appended as it ends, and a run that is there
already is not run again.

    python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz parts
    python -m benchmarks.accuracy.run --data parts --only eight --out results.jsonl
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from benchmarks import mps
from benchmarks.accuracy import convolutions, norms
from benchmarks.accuracy.configurations import (
    ALONE,
    BASELINE,
    RECIPES,
    SETS,
    WAYS,
    Cut,
    Recipe,
    Way,
)
from benchmarks.accuracy.kernels import MOST_ERROR
from benchmarks.accuracy.mnist import Mnist
from benchmarks.accuracy.training import Images, Job, gib_of, train
from benchmarks.averaging.data import Cifar
from benchmarks.pool import Pool, Run, Store, need
from benchmarks.stored import Row, read_rows


def prepared(arguments: argparse.Namespace, until: float) -> Run:
    """What trains a job in one of the processes."""
    torch.backends.cudnn.benchmark = True
    device = torch.device(arguments.device)
    for kernels in (convolutions, norms) if device.type == "cuda" else ():
        if (error := kernels.largest_error(device)) > MOST_ERROR:
            raise SystemExit(f"{kernels.__name__} are off by {error:.1%}")
    sets: dict[str, Images] = {}

    def run(job: Job) -> Row | None:
        name = "mnist" if job.network == "lenet5" else "cifar"
        if name not in sets:
            kind = Mnist if name == "mnist" else Cifar
            sets[name] = kind(arguments.data, device, rows=job.rows)
        return train(job, sets[name], device, until)

    return run


def line(row: Row) -> str:
    """A run in a few words."""
    job = Job.of(row)
    mean = 100 * sum(row.get("accuracies", [0])) / len(job.seeds)
    what = row.get("error") or f"{mean:.2f} %, {row['ms_per_update']} ms a step"
    where = Cut(stages=job.stages, cuts=job.cuts, ppv=job.ppv)
    return f"{job.network}, {where}, {job.way}, lr {job.lr:g}, seeds {job.seeds}: {what}"


def can_compile(way: Way) -> bool:
    """Compiled code may keep casts of older weights, which the rule ``current`` forbids."""
    return all(method.rule != "current" for method, _ in way.method(1000).phases())


def ways_of(arguments: argparse.Namespace, name: str) -> list[str]:
    """Those of a set that are asked for and can be run so."""
    patterns = [pattern.strip() for pattern in arguments.ways.split(";")]
    ways = [way for way in SETS[name].ways if any(fnmatch(way, pattern) for pattern in patterns)]
    if not arguments.compile:
        return ways
    if left_out := [way for way in ways if not can_compile(WAYS[way])]:
        print(f"left out of {name}, compiled in bf16: {'; '.join(left_out)}", flush=True)
    return [way for way in ways if way not in left_out]


def jobs_of(arguments: argparse.Namespace, name: str) -> list[Job]:
    """Group of seeds by group, BP first: whatever the time allows is nearly a whole comparison."""
    of = SETS[name]
    recipe = RECIPES.get(of.network, Recipe())
    ways = ways_of(arguments, name)
    cuda = arguments.device.startswith("cuda")
    made = []
    for seeds in of.seeds[: arguments.groups]:
        for rate in of.rates:
            job = partial(
                Job,
                network=of.network,
                epochs=arguments.epochs or of.epochs,
                rows=arguments.rows,
                batch=recipe.batch,
                lr=rate * recipe.lr,
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
                bf16=cuda,
                compiled=arguments.compile,
            )
            # Networks that are trained alone are compared with BP of networks trained alone.
            groupings = dict.fromkeys(_grouped(way, seeds) for way in (BASELINE, *ways))
            runs = [(BASELINE, Cut(stages=1), group) for groups in groupings for group in groups]
            runs += [
                (way, cut, group)
                for cut in of.cuts
                for way in ways
                for group in _grouped(way, seeds)
            ]
            made += [
                job(
                    **asdict(cut),
                    way=way,
                    seeds=group,
                    kernels="fused" if cuda and len(group) > 1 else "separate",
                )
                for way, cut, group in runs
            ]
    return made


def _grouped(way: str, seeds: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Seeds that are trained as one."""
    return tuple((seed,) for seed in seeds) if way in ALONE else (tuple(seeds),)


def new_ones(jobs: Iterable[Job], out: Path) -> list[Job]:
    """Each once, and none that is stored."""
    stored = read_rows(out) if out.exists() else []
    known = {Job.of(row).key for row in stored if "error" not in row}
    return [job for job in {job.key: job for job in jobs}.values() if job.key not in known]


def main() -> None:
    parser = argparse.ArgumentParser(description="What staleness costs in accuracy.")
    parser.add_argument(
        "--data", type=Path, required=True,
        help="the folder that pack.py wrote; for LeNet-5, that of MNIST's four files",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), help="appended to")
    parser.add_argument("--only", nargs="+", choices=SETS, required=True, help="sets of runs")
    parser.add_argument("--ways", default="*", help="of these sets, as in '1F1B*'; BP always")
    parser.add_argument("--groups", type=int, help="of seeds; by default all of a set")
    parser.add_argument("--epochs", type=int, help="by default those of each set")
    parser.add_argument("--rows", type=int, default=60_000, help="training images, at most")
    parser.add_argument("--compile", action="store_true", help="all stages, of BP as well")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--gib", type=float, default=120.0, help="that runs may take together")
    parser.add_argument("--limit-s", type=float, default=1e6)
    arguments = parser.parse_args()
    need(arguments.device, arguments.data, instead="--device cpu tries it out.")
    jobs = new_ones(
        (job for name in arguments.only for job in jobs_of(arguments, name)), arguments.out
    )
    print(f"{len(jobs)} runs", flush=True)
    with mps.sharing(arguments.device.startswith("cuda")) as served:
        pool = Pool(
            partial(prepared, arguments),
            Store(arguments, served, line),
            parallel=min(arguments.parallel, len(jobs)),
            limit_s=arguments.limit_s,
            needs=gib_of,
            most=arguments.gib,
        )
        try:
            pool.finish(jobs)
        finally:
            pool.close()


if __name__ == "__main__":
    main()
