"""Drained checkpoints: training state by the names of the unsplit model, so that any cut fits it.

Optimizers belong to stages, their state to weights: what a stage's optimizers know is stored per
weight, and another cut's optimizers pick what belongs to theirs. Learning rates and schedulers are
taken from the group that a group's first weight was in.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offbeat.errors import ConfigurationError
from offbeat.snapshot import copied, load_optimizer
from offbeat.stage import Stage

State = dict[str, Any]


def stage_state(stage: Stage, model: nn.Module) -> State:
    """What a drained stage has beside the model's weights."""
    names = _names(stage, model)
    optimizers = []
    for number, optimizer in enumerate(stage.optimizers):
        state = optimizer.state_dict()
        groups = [
            {**group, "params": [names[id(p)] for p in held["params"]]}
            for group, held in zip(state["param_groups"], optimizer.param_groups, strict=True)
        ]
        of_weight = {
            names[id(p)]: state["state"][index]
            for group, held in zip(state["param_groups"], optimizer.param_groups, strict=True)
            for index, p in zip(group["params"], held["params"], strict=True)
            if index in state["state"]
        }
        scheduler = stage.schedulers[number].state_dict() if stage.schedulers else None
        optimizers.append(
            copied(
                {
                    "kind": type(optimizer).__name__,
                    "groups": groups,
                    "weights": of_weight,
                    "scheduler": scheduler,
                }
            )
        )
    heads = {
        name: value.detach().clone()
        for head in stage.modules[1:]
        for name, value in head.state_dict().items()
    }
    return {
        "version": stage.version,
        "optimizers": optimizers,
        "head": heads,
        "corrections": stage.corrector.state_dict(),
    }


def take_over(stage: Stage, model: nn.Module, states: Sequence[State]) -> None:
    """Gives a stage of any cut what the stages of another have stored of its weights."""
    names = _names(stage, model)
    stored = [optimizer for state in states for optimizer in state["optimizers"]]
    for number, optimizer in enumerate(stage.optimizers):
        state = optimizer.state_dict()
        source: State | None = None
        for group, held in zip(state["param_groups"], optimizer.param_groups, strict=True):
            own = [names[id(parameter)] for parameter in held["params"]]
            known = [name for name in own if not name.startswith(_HEAD)]
            if not known:
                continue  # of a head, which a fresh one has to learn anyway
            source = _owner(stored, known[0], optimizer)
            rates = next(g for g in source["groups"] if known[0] in g["params"])
            group.update({key: value for key, value in rates.items() if key != "params"})
            for index, name in zip(group["params"], own, strict=True):
                for other in stored:
                    if name in other["weights"]:
                        state["state"][index] = other["weights"][name]
        load_optimizer(optimizer, copied(state))
        if source is not None and stage.schedulers and source["scheduler"] is not None:
            stage.schedulers[number].load_state_dict(copied(source["scheduler"]))
    stage.version = max(state["version"] for state in states)
    for head in stage.modules[1:]:
        stored_head = states[stage.index]["head"] if stage.index < len(states) else {}
        # Of another cut, a head is made for other activations and starts anew.
        if {n: v.shape for n, v in head.state_dict().items()} == {
            n: v.shape for n, v in stored_head.items()
        }:
            head.load_state_dict(stored_head)


_HEAD = "head of stage "


def _names(stage: Stage, model: nn.Module) -> dict[int, str]:
    """The unsplit model's name of every weight; a head's weights are named by their stage."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for head in stage.modules[1:]:
        for name, parameter in head.named_parameters():
            names[id(parameter)] = f"{_HEAD}{stage.index}: {name}"
    return names


def _owner(stored: Sequence[State], name: str, optimizer: Optimizer) -> State:
    for other in stored:
        if any(name in group["params"] for group in other["groups"]):
            if other["kind"] != type(optimizer).__name__:
                raise ConfigurationError(
                    f"the checkpoint has the state of {other['kind']} for {name!r}, and the trainer"
                    f" was built with {type(optimizer).__name__}: give it the same optimizer, or"
                    " load the weights alone, with load_state_dict(torch.load('.../model.pt'))."
                )
            return other
    raise ConfigurationError(
        f"the checkpoint has no optimizer state for {name!r}: was it trained then, and is it now?"
    )
