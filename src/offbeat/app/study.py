"""How much staleness a model takes: methods x stages x accumulation x seeds, and what they cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from offbeat.app.experiment import Experiment
from offbeat.app.runs import CONFIG, Run
from offbeat.errors import ConfigurationError
from offbeat.registry import Choice, spell, split_choices


@dataclass(frozen=True)
class Cell:
    """One configuration over all its seeds."""

    method: str
    stages: int
    lags: tuple[int, ...]
    scores: tuple[float, ...]
    """Accuracy per seed, or the negative loss where there is no accuracy."""
    gaps: tuple[float, ...]
    """To synchronous training, seed by seed."""

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def spread(self) -> float:
        return stdev(self.scores) if len(self.scores) > 1 else 0.0

    @property
    def gap(self) -> float:
        return fmean(self.gaps) if self.gaps else 0.0


def plan(
    base: Experiment, methods: Sequence[str], stages: Sequence[int], seeds: int
) -> dict[str, Experiment]:
    """Every run of a study by the name of its folder; synchronous training first.

    A method may bring corrections of its own: ``pipedream+spike-compensation``.
    """
    planned = {}
    for seed, count, text in product(range(seeds), stages, ["synchronous", *methods]):
        method, *own = (Choice.read(part, "--methods") for part in split_choices(text))
        corrections = (*base.correction, *own)
        # Without lag the number of stages changes nothing, not even a bit, nor do corrections.
        if method.name == "synchronous":
            if own:
                raise ConfigurationError(
                    f"--methods {text}: without lag a correction changes nothing. Leave it out."
                )
            count, corrections = 1, ()
        experiment = replace(
            base, method=method, correction=corrections, stages=count, cuts=(), ppv=(), seed=seed
        )
        label = _method_name(experiment).replace(":", "-").replace("=", "")
        planned[f"{label}-K{count}-seed{seed}"] = experiment
    return planned


def run_study(
    planned: Mapping[str, Experiment], folder: Path, say: Callable[[str], None]
) -> list[Run]:
    """Runs what is missing; finished runs of the same configuration are read instead.

    One that did not finish is taken up again. Returns the finished ones: all, but for a Ctrl-C.
    """
    from offbeat.app.training import check_experiment, run_experiment

    runs = []
    of_one_seed = {(_method_name(e), e.stages): e for e in planned.values()}
    for experiment in of_one_seed.values():
        check_experiment(experiment)  # before hours are spent on the others
    for number, (name, experiment) in enumerate(planned.items(), 1):
        place = folder / name
        begun = (place / CONFIG).exists()
        if begun:
            stored = Run.load(place)
            _check_same(stored, experiment)
            if stored.summary.get("status") == "finished":
                say(f"{number}/{len(planned)} {name}: found")
                runs.append(stored)
                continue
        summary = run_experiment(experiment, place, resume=begun)
        if summary["status"] != "finished":
            say(
                f"{number}/{len(planned)} {name}: interrupted. {len(runs)} of {len(planned)} runs"
                " are finished; the same command goes on."
            )
            break
        score = summary["accuracy"]
        words = f"{score:.2%}" if score is not None else f"loss {summary['loss']:.4f}"
        say(f"{number}/{len(planned)} {name}: {words}")
        runs.append(Run.load(place))
    return runs


def _check_same(run: Run, wanted: Experiment) -> None:
    stored = Experiment.of_run(run.config)
    for name in stored.unlike(wanted, "recipe", "run"):
        raise ConfigurationError(
            f"{run.folder} was run with {name}={spell(getattr(stored, name))}, and this study asks"
            f" for {spell(getattr(wanted, name))}: give another folder (--out)."
        )


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    """Seeds put together, each compared with synchronous training of the same seed."""
    by_seed: dict[tuple[str, int], dict[int, Run]] = {}
    for run in runs:
        experiment = Experiment.of_run(run.config)
        key = _method_name(experiment), int(run.config["stages"])
        by_seed.setdefault(key, {})[experiment.seed] = run
    synchronous = next((of for (method, _), of in by_seed.items() if method == "synchronous"), {})
    return [
        Cell(
            method,
            stages,
            tuple(next(iter(of_method.values())).config["lags"]),
            tuple(map(_score, of_method.values())),
            tuple(
                _score(run) - _score(synchronous[seed])
                for seed, run in of_method.items()
                if seed in synchronous
            ),
        )
        for (method, stages), of_method in by_seed.items()
    ]


def _method_name(experiment: Experiment) -> str:
    """With its corrections, as ``--methods`` has it."""
    return "+".join(map(str, (experiment.method, *experiment.correction)))


def _score(run: Run) -> float:
    accuracy = run.summary["accuracy"]
    return float(accuracy) if accuracy is not None else -float(run.summary["loss"])
