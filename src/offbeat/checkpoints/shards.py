"""A model that no process has whole, written as transformers writes large ones.

A file per stage, by the process that holds it, and an index that says where each weight is.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.averaging.replicas import state_of
from offbeat.checkpoints.weights import INDEX, SINGLE, to_chunks
from offbeat.engines.board import LOST
from offbeat.engines.pipeline import Pipeline
from offbeat.errors import CheckpointError, StorageError
from offbeat.records import disk

State = dict[str, Any]


def save(pipeline: Pipeline, folder: Path) -> None:
    """Writes the newest weights, of replicas their mean; all processes call it."""
    engine, model = pipeline.engine, pipeline.cut.model
    if not pipeline.is_built:
        raise CheckpointError(
            "there is nothing to save yet: the first step makes the stages. Save after it."
        )
    with pipeline.stopping_on_error(alone=False), engine.between_steps():
        keeper = engine.first_replica()
        with pipeline.models.lent():
            own = _own_weights(pipeline)
        writes = keeper in engine.placement.replicas_here
        told: State = {"shards": {}, "bytes": 0, "problem": None}
        try:
            for stage, weights in own.items() if writes else ():
                folder.mkdir(parents=True, exist_ok=True)
                name = _file_of(stage, pipeline.cut.stages)
                disk.write(folder / name, to_chunks(weights))
                told["shards"] |= dict.fromkeys(weights, name)
                told["bytes"] += sum(value.nbytes for value in weights.values())
        except OSError as error:  # StorageError is one
            told["problem"] = str(error)
        everyone = [each for each in pipeline.meet("shards", told) if each is not LOST]
        problem = next(filter(None, (each["problem"] for each in everyone)), None)
        if problem is None and engine.rank == min(engine.placement.row_of(keeper)):
            try:
                _write_index(folder, everyone)
                _write_words(folder, model)
            except OSError as error:
                problem = str(error)
        # Nobody goes on, to read the folder perhaps, before it is whole.
        said = [each for each in pipeline.meet("index", problem) if each is not LOST]
        if problem := next(filter(None, said), None):
            raise StorageError(problem)


def _own_weights(pipeline: Pipeline) -> dict[int, dict[str, Tensor]]:
    """By stage and name what this process writes; what several stages have, the first of them."""
    states = pipeline.replicas.states()
    names: dict[int, str] = {}
    for name, entry in pipeline.cut.model.state_dict(keep_vars=True).items():
        names.setdefault(id(entry), name)
    found: dict[int, dict[str, Tensor]] = {stage: {} for stage in states}
    owned: set[int] = set()
    for stage, module in enumerate(pipeline.cut.modules):
        for key, entry in state_of(module).items():
            if id(entry) in names and id(entry) not in owned and stage in found:
                found[stage][names[id(entry)]] = states[stage][key]
            owned.add(id(entry))
    return found


def _file_of(stage: int, stages: int) -> str:
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def _write_index(folder: Path, everyone: list[State]) -> None:
    where = {name: file for told in everyone for name, file in told["shards"].items()}
    size = sum(told["bytes"] for told in everyone)
    words = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    disk.write(folder / INDEX, json.dumps(words, indent=2) + "\n")
    # What is left of an earlier save would be read in the place of these, or beside them.
    for path in [folder / SINGLE, *folder.glob("model-*-of-*.safetensors")]:
        if path.name not in where.values():
            path.unlink(missing_ok=True)


def _write_words(folder: Path, model: Any) -> None:
    """What transformers needs beside weights."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
