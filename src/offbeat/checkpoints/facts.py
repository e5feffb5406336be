"""What must be the same for a run to go on from a checkpoint, compared in words."""

import hashlib
import re
import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.averaging import Averaging
from offbeat.engines.pipeline import Pipeline
from offbeat.engines.placement import Placement
from offbeat.engines.setup import describe
from offbeat.errors import ConfigurationError
from offbeat.stages.state import STATE_FORMAT

Manifest = dict[str, Any]

_WORDS = {
    "stages": "a number of stages of",
    "replicas": "a number of replicas of",
    "layers": "layers of digest",
    "torch": "PyTorch",
    "threads": "a number of threads of",
    "state_format": "the state of its stages in format",
}
"""For facts that are not called in a sentence what they are called here."""
_MISSING = object()


def facts_of(pipeline: Pipeline) -> dict[str, Any]:
    """What must be the same for a run to go on exactly."""
    setup, cut = pipeline.setup, pipeline.cut
    return {
        "method": describe(setup.course.method),
        "stages": cut.stages,
        "cuts": None if cut.places is None else list(cut.places),
        "replicas": setup.replicas,
        "averaging": _describe_averaging(setup.averaging),
        "corrections": [describe(correction) for correction in setup.course.corrections],
        "monitor": describe(setup.monitor),
        "guards": describe(setup.guards),
        "compile": setup.compile,
        "seed": pipeline.seed,
        "clip": setup.clip,
        "autocast": None if setup.autocast is None else str(setup.autocast),
        "layers": _digest_layers(cut.model),
        "state_format": STATE_FORMAT,
    }


def _other_cuts(pipeline: Pipeline) -> list[list[Any]]:
    """Where this model may turn out to be cut instead, once there is a batch."""
    other = pipeline.cut.otherwise() if pipeline.cut.needs_batch else None
    return [] if other is None or other.places is None else [list(other.places)]


def _describe_averaging(averaging: Averaging | None) -> str:
    """With what its defaults come to, which may differ between versions."""
    if averaging is None:
        return describe(None)
    return describe(replace(averaging, optimizer_state=averaging.state_at_merge))


def describe_model(model: nn.Module) -> dict[str, str]:
    """Names, types and shapes of the model's weights and buffers."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def _digest_layers(model: nn.Module) -> str:
    """A digest of the model as it prints, which tells a dropout of 0.1 from one of 0.2."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def placement_of(manifest: Manifest) -> Placement | None:
    """Where the stages of an exact checkpoint were; None if it does not say."""
    stages, replicas, rows = (manifest.get(n, 0) for n in ("stages", "replicas", "placement"))
    if any(type(count) is not int or count < 1 for count in (stages, replicas)):
        return None
    if stages * (replicas - len(gone_of(manifest))) > len(manifest["files"]):
        return None
    if not rows:  # an earlier version had one stage or all of them in a process
        size = manifest.get("processes")
        whole = size in (1, stages * replicas)
        return Placement.across(stages, replicas, size, 0) if whole and size else None
    try:
        ranks = tuple(map(tuple, rows))
        if any(type(rank) is not int for rank in chain(*ranks)):
            return None
        if [len(row) for row in ranks] != [stages] * len(rows) or len(rows) != replicas:
            return None
        counts = [ranks[0].count(rank) for rank in dict.fromkeys(ranks[0])]
        found = Placement.across(stages, replicas, len({*chain(*ranks)}), 0, counts)
    except (TypeError, LookupError, ValueError, OverflowError):
        return None
    return found if found.ranks == ranks else None


def gone_of(manifest: Manifest) -> set[int]:
    """The replicas that had died when an exact checkpoint was saved."""
    found = manifest.get("gone", [])
    whole = isinstance(found, list) and all(type(replica) is int for replica in found)
    return set(found) if whole else set()


def compare_models(path: Path, manifest: Manifest, model: nn.Module) -> None:
    """Refuses a checkpoint of another model."""
    ours, theirs = describe_model(model), manifest["model"]
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"{path} is of another model: {name!r} is {theirs.get(name, 'missing')} there and"
                f" {ours.get(name, 'missing')} here. Build the same model."
            )


def compare_facts(path: Path, manifest: Manifest, pipeline: Pipeline) -> None:
    """Refuses an exact checkpoint of other settings; warns where only bits may differ."""
    if {"stages", "replicas"} <= manifest.keys() and placement_of(manifest) is None:
        raise ConfigurationError(
            f"{path} does not say which of its processes held which stages (placement, or processes"
            " in those of an older version): its manifest has been changed, or damaged. Resume from"
            " another checkpoint."
        )
    for name, value in facts_of(pipeline).items():
        stored = manifest.get(name, _MISSING)
        if name == "cuts" and (value is None or stored in _other_cuts(pipeline)):
            continue  # decided by the stored first batch, and compared behind it
        if stored is _MISSING:
            raise ConfigurationError(
                f"{path} does not say what {name} it was saved with: an older version of offbeat"
                f" wrote it, and this one goes on exactly only where {name} is known to be the"
                " same. Resume it with the version that wrote it, and save with drain=True there."
            )
        if stored != value:
            raise ConfigurationError(
                f"{path} was saved with {_WORDS.get(name, name)} {stored}, and this trainer has"
                f" {value}. An exact checkpoint holds what is in flight, so only the same"
                " settings can go on from it: build the trainer as it was, or resume from one"
                " saved with drain=True."
            )
    then = {"torch": manifest["versions"]["torch"], "threads": manifest["threads"]}
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for name, value in now.items():
        if then[name] != value and pipeline.engine.rank == 0:
            warnings.warn(
                f"{path} was saved with {_WORDS[name]} {then[name]}, this is {value}: the run"
                " goes on, but not necessarily with the same bits.",
                stacklevel=5,
            )
