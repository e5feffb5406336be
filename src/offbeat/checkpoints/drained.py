"""Drained checkpoints: training state by the names of the unsplit model, so that any cut fits it.

Optimizers belong to stages, their state to weights: what a stage's optimizers know is stored per
weight, and another cut's optimizers pick what belongs to theirs. Learning rates and schedulers are
taken from the group that a group's first weight was in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.checkpoints import tensorfile
from offbeat.checkpoints.facts import Manifest, facts_of
from offbeat.checkpoints.folder import MODEL, PICKLED, file_of
from offbeat.checkpoints.weights import open_weights
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.setup import describe
from offbeat.errors import ConfigurationError
from offbeat.stages.corrector import shapes_of
from offbeat.stages.snapshot import copied, load_optimizer, on_device
from offbeat.stages.stage import Stage

State = dict[str, Any]


_OF_CORRECTIONS = ("method", "stages", "cuts", "corrections")
"""What must be the same for corrections to go on with what they remember."""


def keeper(pipeline: Pipeline) -> int:
    """The replica that is written: the first that is there."""
    with pipeline.stopping_on_error():
        return pipeline.engine.first_replica()


def model_of(manifest: Manifest) -> str:
    """The file that has the weights."""
    return PICKLED if PICKLED in manifest["files"] else MODEL


def files_of(pipeline: Pipeline, replica: int) -> dict[str, Any]:
    """What this process writes."""
    state = pipeline.weights()  # by every process
    files: dict[str, Any] = {}
    for worker in pipeline.engine.workers:
        if worker.stage.replica == replica:
            found = files[file_of(0, worker.stage.index)] = _stage_state(
                worker.stage, pipeline.cut.model
            )
            if worker.stage.index == 0:
                found["place"], files[MODEL] = pipeline.position.state(), state
    return files


def resume(pipeline: Pipeline, path: Path, manifest: Manifest) -> None:
    engine, device = pipeline.engine, pipeline.setup.device
    states = [tensorfile.read(path / file_of(0, stage)) for stage in range(manifest["stages"])]
    weights = open_weights(path / model_of(manifest))
    pipeline.discard()
    pipeline.models.load(weights)
    place = dict(states[0]["place"])
    if manifest["method"] != describe(pipeline.setup.course.method):
        place |= {"phase": 0, "steps_in_phase": 0}
    pipeline.position.load(on_device(place, device))

    def take_over() -> None:
        models = dict(zip(engine.placement.replicas_here, pipeline.models, strict=True))
        facts = facts_of(pipeline)
        same = all(manifest.get(name) == facts[name] for name in _OF_CORRECTIONS)
        for worker in engine.workers:
            _take_over(worker.stage, models[worker.stage.replica], states)
            if same:
                remembered = states[worker.stage.index]["corrections"]
                worker.stage.corrector.load_state_dict(on_device(remembered, device))
            if worker.averager is not None:
                worker.averager.forget()

    if engine.workers:
        take_over()
    else:
        pipeline.when_built = take_over


def _stage_state(stage: Stage, model: nn.Module) -> State:
    """What a drained stage has beside the model's weights."""
    names = _names(stage, model)
    optimizers = []
    for number, optimizer in enumerate(stage.optimizers):
        state = optimizer.state_dict()
        groups, of_weight = [], {}
        for group, held in zip(state["param_groups"], optimizer.param_groups, strict=True):
            own = [names[id(parameter)] for parameter in held["params"]]
            groups.append({**group, "params": own})
            for index, name in zip(group["params"], own, strict=True):
                if index in state["state"]:
                    known = state["state"][index].items()
                    of_weight[name] = {key: _filled(value) for key, value in known}
        stored = {
            "kind": type(optimizer).__name__,
            "groups": groups,
            "weights": of_weight,
            "scheduler": stage.schedulers[number].state_dict() if stage.schedulers else None,
        }
        optimizers.append(copied(stored))
    return {
        "version": stage.version,
        "optimizers": optimizers,
        "head": {} if stage.head is None else copied(dict(stage.head.state_dict())),
        "corrections": stage.corrector.state_dict(),
    }


def _filled(value: Any) -> Any:
    """Sparse tensors, of sparse gradients, cannot be stored."""
    return value.to_dense() if isinstance(value, Tensor) else value


def _take_over(stage: Stage, model: nn.Module, states: Sequence[State]) -> None:
    """Gives a stage of any cut what the stages of another have stored of its weights."""
    names = _names(stage, model)
    stored = [optimizer for state in states for optimizer in state["optimizers"]]
    head = _stored_head(stage, states)
    for number, optimizer in enumerate(stage.optimizers):
        state = optimizer.state_dict() | {"state": {}}
        schedules: list[_Scheduled | None] = []
        for group, held in zip(state["param_groups"], optimizer.param_groups, strict=True):
            own = [names[id(parameter)] for parameter in held["params"]]
            known = [name for name in own if head is not None or not name.startswith(_HEAD)]
            if not known:
                schedules.append(None)  # of a head, which a fresh one has to learn anyway
                continue
            source = _owner(stored, known[0], optimizer)
            place = next(n for n, g in enumerate(source["groups"]) if known[0] in g["params"])
            schedules.append(_Scheduled(source["scheduler"], len(source["groups"]), place))
            rates = source["groups"][place]
            group.update({key: value for key, value in rates.items() if key != "params"})
            for index, name in zip(group["params"], own, strict=True):
                for other in stored:
                    if name in known and name in other["weights"]:
                        state["state"][index] = other["weights"][name]
        load_optimizer(optimizer, copied(state))
        if stage.schedulers:
            _take_schedules(stage.schedulers[number], schedules)
    stage.version = max(state["version"] for state in states)
    if stage.head is not None and head is not None:
        stage.head.load_state_dict(head)


def _stored_head(stage: Stage, states: Sequence[State]) -> State | None:
    """None for a head of another cut, which is made for other activations and starts anew."""
    found: State = states[stage.index]["head"] if stage.index < len(states) else {}
    if stage.head is None or shapes_of(stage.head.state_dict()) != shapes_of(found):
        return None
    return found


@dataclass(frozen=True)
class _Scheduled:
    """Where a group was: the state of its scheduler, which had so many groups, and its place."""

    scheduler: State
    groups: int
    place: int

    def part(self, number: int) -> "_Scheduled":
        """Of one that is made of several."""
        return replace(self, scheduler=self.scheduler["_schedulers"][number])


def _take_schedules(scheduler: LRScheduler, schedules: Sequence[_Scheduled | None]) -> None:
    """``schedules``: one per group of the scheduler's optimizer; None for a fresh group."""
    known = [one for one in schedules if one is not None]
    if known and all(one.scheduler for one in known):
        # What is fresh goes by the same clock, from the rate it was given.
        own = scheduler.state_dict()
        found = [one or _Scheduled(own, len(schedules), n) for n, one in enumerate(schedules)]
        scheduler.load_state_dict(copied(_regrouped(found, known[-1])))


def _regrouped(found: Sequence[_Scheduled], clock: _Scheduled) -> State:
    """The state of a scheduler for these groups: of each what its own had for it.

    ``clock``: one of them, for what is not by group.
    """
    made = dict(clock.scheduler)
    for key, value in clock.scheduler.items():
        if key == "_schedulers":
            parts = range(len(value))
            made[key] = [_regrouped([o.part(n) for o in found], clock.part(n)) for n in parts]
        elif isinstance(value, list) and len(value) == clock.groups and key not in _NOT_BY_GROUP:
            made[key] = [one.scheduler[key][one.place] for one in found]
    return made


_NOT_BY_GROUP = ("_milestones", "_schedule_phases")
"""Lists of SequentialLR and OneCycleLR that may happen to be as long as there are groups."""

_HEAD = "head of stage "


def _names(stage: Stage, model: nn.Module) -> dict[int, str]:
    """The unsplit model's name of every weight; a head's weights are named by their stage."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if stage.head is not None:
        for name, parameter in stage.head.named_parameters():
            names[id(parameter)] = f"{_HEAD}{stage.index}: {name}"
    return names


def _owner(stored: Sequence[State], name: str, optimizer: Optimizer) -> State:
    for other in stored:
        if any(name in group["params"] for group in other["groups"]):
            if other["kind"] != type(optimizer).__name__:
                raise ConfigurationError(
                    f"the checkpoint has the state of {other['kind']} for {name!r}, and the trainer"
                    f" was built with {type(optimizer).__name__}: give it the same optimizer, or"
                    " load the weights alone: trainer.load_state_dict(load_weights(path)), from"
                    " offbeat.checkpoints."
                )
            return other
    raise ConfigurationError(
        f"the checkpoint has no optimizer state for {name!r}: was it trained then, and is it now?"
    )
