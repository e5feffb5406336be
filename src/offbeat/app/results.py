"""What a stored run says of itself: how it was set up, and what came out."""

import math
import platform
import shlex
from collections import Counter, defaultdict
from dataclasses import asdict, fields
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from offbeat import __version__
from offbeat.app.experiment import Experiment
from offbeat.app.progress import Progress
from offbeat.guards import Update, Updates
from offbeat.records.ledger import Ledger
from offbeat.registry import Choice, spell
from offbeat.trainer import Trainer


def describe_run(experiment: Experiment, trainer: Trainer) -> dict[str, Any]:
    """What was asked for, and what was made of it: ``config.json``."""
    return {
        **experiment.as_dict(),
        **_describe_plan(trainer),
        "lags": list(trainer.lags),
        "stages": trainer.stages,
        "command": command_of(experiment, trainer.mesh_size),
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "processes": trainer.mesh_size,
        "versions": {
            "offbeat": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
    }


def command_of(experiment: Experiment, processes: int) -> str:
    """What repeats a run with the same bits, to be pasted into a shell."""
    launch = ["torchrun", "--nproc-per-node", str(processes), "-m", "--"] if processes > 1 else []
    words = [f"OMP_NUM_THREADS={torch.get_num_threads()}", *launch, "offbeat", "train"]
    for each in fields(experiment):
        value, name = getattr(experiment, each.name), each.name.replace("_", "-")
        if isinstance(value, bool) and value != each.default:
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value != each.default:
            text = "+".join(map(spell, value)) if name == "correction" else spell(value)
            words += [f"--{name}", "" if value == () else text]
    return shlex.join(words)


def _describe_plan(trainer: Trainer) -> dict[str, Any]:
    """What "auto" came to, in the words in which a configuration says it."""
    plan = trainer.plan
    if plan is None:
        return {}
    method = asdict(Choice.of(plan.method))
    corrections = [asdict(Choice.of(correction)) for correction in trainer.corrections]
    return {"plan": {"method": method, "correction": corrections, "reasons": list(plan.reasons)}}


def summarize_run(
    trainer: Trainer, ledger: Ledger, progress: Progress, time_s: float, clip: float | None
) -> dict[str, Any]:
    """What came out, as far as ``summary.json`` has it; all processes must ask for it."""
    test = progress.evaluation
    stages = range(trainer.stages)
    tally = ledger.tally()
    lags: dict[int, Counter[int]] = {k: Counter() for k in stages}
    for (_, stage), line in tally.items():
        lags[stage] += line.lags
    return {
        "steps": progress.step,
        "epochs": progress.step / progress.steps_per_epoch,
        "time_s": time_s,
        "loss": None if test is None else test.loss,
        "accuracy": None if test is None else test.accuracy,
        "rows_per_s": progress.rows_per_s,
        "lags": {str(k): {str(lag): of[lag] for lag in sorted(of)} for k, of in lags.items()},
        "memory": [asdict(of_stage) for of_stage in progress.memory],
        "waits": {
            f"{r}/{k}": {
                "averages": line.averages,
                "total_s": line.waited_s,
                "longest_s": line.longest_s,
            }
            for (r, k), line in sorted(tally.items())
            if line.averages
        },
        "guards": summarize_guards(
            trainer.updates, clip, by_model=trainer.method.schedule(trainer.stages).synchronous
        ),
        "busy_share": ledger.busy_shares(trainer.stages),
        "cuts": None if trainer.cuts is None else list(trainer.cuts),
    }


def summarize_guards(
    updates: Updates, clip: float | None = None, *, by_model: bool = False
) -> dict[str, dict[str, Any]]:
    """What the guards saw, by replica and stage; empty without guards.

    ``clip``: the bound on norms, of each stage or, ``by_model``, of all stages together.
    """
    squares: dict[tuple[int, int], float] = defaultdict(float)
    places: dict[str, list[Update]] = defaultdict(list)
    for update in updates:
        squares[update.replica, update.update] += update.norm**2
        places[f"{update.replica}/{update.stage}"].append(update)

    def is_clipped(update: Update) -> bool:
        norm = math.sqrt(squares[update.replica, update.update]) if by_model else update.norm
        return clip is not None and update.outcome == "applied" and norm > clip

    summaries = {}
    for place, of in places.items():
        norms = [update.norm for update in of if math.isfinite(update.norm)]
        outcomes = Counter(update.outcome for update in of)
        summaries[place] = {
            "updates": len(of),
            "dropped": len(of) - outcomes["applied"],
            "skipped": outcomes["skipped"],
            "rolled_back": outcomes["rolled back"],
            "clipped": None if clip is None else sum(map(is_clipped, of)),
            "not_finite": len(of) - len(norms),
            "median_norm": median(norms) if norms else None,
            "largest_norm": max(norms, default=0.0),
            "largest_lag": max(update.lag for update in of),
        }
    return summaries
