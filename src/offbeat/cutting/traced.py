"""Any other model: traced by PyTorch's own tools and split where a named module begins.

``torch.distributed.pipelining.pipeline`` records a forward (``torch.export``) and cuts the record.
Parameters stay the model's own. A record is either of training or of evaluation, so there are two,
and the model's mode decides which one runs; modules that are frozen in evaluation stay so in both.
What a later stage needs of an earlier one than its neighbour travels through the stages in between.
Records are of one shape; another is refused.
"""

import operator
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from offbeat import nest
from offbeat.cutting.balance import cut_by_costs
from offbeat.cutting.compare import compare_with_whole, find_loan
from offbeat.cutting.costs import count_between
from offbeat.cutting.cut import Balance, Cut, Wish
from offbeat.errors import BatchError, ConfigurationError, StageError
from offbeat.nest import Nest
from offbeat.stages.attributes import Change, hook_of
from offbeat.stages.trial import switch_mode

_INPUT = "x"


@dataclass(frozen=True, kw_only=True)
class TracedCut(Cut):
    """A model split where named modules are called; without names the counted cost decides."""

    shapes: tuple[torch.Size, ...] | None = None
    """Of the inputs that the stages were recorded for."""

    @classmethod
    def plan(cls, wish: Wish) -> "TracedCut | None":
        model = wish.model
        if not isinstance(model, nn.Module):
            return None
        near = candidates(model)
        if wish.cuts is None:
            if wish.count > len(near):
                raise ConfigurationError(
                    f"{wish.count} stages, but this {type(model).__name__} has {len(near)} modules"
                    " to cut at: give fewer stages, or a list of modules, one per stage."
                )
            return cls(model=model, stages=wish.count, places=None)
        known = dict(model.named_modules())
        for path in wish.cuts:
            if isinstance(path, int):
                raise ConfigurationError(
                    f"cuts={list(wish.cuts)}: this {type(model).__name__} has no numbered children"
                    " to cut at; give the paths of modules."
                )
            if path not in known or not path:
                raise ConfigurationError(
                    f"cuts: {path!r} is not a module of this {type(model).__name__}. A stage"
                    f" begins at the path of a module, such as {', '.join(near[:8])}."
                )
        return cls(model=model, stages=wish.count, places=tuple(map(str, wish.cuts)))

    def make(self, batch: Nest, balance: Balance) -> "TracedCut":  # noqa: ARG002
        if self.places is None:
            known = candidates(self.model)
            costs = count_between(self.model, known, batch)
            paths = [known[place] for place in cut_by_costs(costs, self.stages)]
        else:
            paths = [str(path) for path in self.places]
        if (hook := hook_of([self.model])) is not None:
            raise ConfigurationError(
                f"the hook {hook} would be called while this {type(self.model).__name__} is traced"
                " and never again. Take it off, or pass a list of modules, one per stage."
            )
        lend = find_loan(self.model, batch)
        stages = _stages_of(self.model, paths, batch)
        compare_with_whole(self.model, stages, batch, ", ".join(paths), lend)
        return replace(self, places=tuple(paths), modules=tuple(stages), shapes=_shapes_of(batch))

    def copy(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own deprecations
            return super().copy()

    def sample(self, batch: Nest, micro_batches: int) -> Nest:
        return nest.split(batch, micro_batches)[0]  # recorded for the shape that stages will see

    def check_batch(self, inputs: Sequence[Nest], micro_batches: int) -> None:
        pieces = [piece for x in inputs for piece in nest.split(x, micro_batches)]
        for piece in pieces:
            _check_shapes(self.shapes or _shapes_of(pieces[0]), piece)

    def follow(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.name != "training":
                known = "" if not change.is_plain else f" from {change.before!r} to {change.now!r}"
                raise ConfigurationError(
                    f"{change} was changed{known} since this model was traced, and a trace has such"
                    " values built in. Put it back, or build a new Trainer with the weights of"
                    " state_dict(); a list of modules as stages follows changes. The batch was not"
                    " started."
                )

    def check_timing(self) -> None:
        raise ConfigurationError(
            f"balance='measured': the parts of this {type(self.model).__name__}, which is traced,"
            " cannot be run alone. Leave out balance, or give cuts=."
        )


def candidates(model: nn.Module) -> list[str]:
    """Paths at which a stage could begin: children, and those of nn.Sequentials among them."""
    paths: list[str] = []
    for name, child in model.named_children():
        inner = candidates(child) if isinstance(child, nn.Sequential) else []
        paths += [f"{name}.{path}" for path in inner] or [name]
    return paths


def _shapes_of(batch: Nest) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in nest.tensors(batch))


def _check_shapes(recorded: Sequence[torch.Size], batch: Nest) -> None:
    for was, now in zip(recorded, _shapes_of(batch), strict=True):
        if was != now:
            raise BatchError(
                f"this model was traced for inputs of {tuple(was)} and was given {tuple(now)}: a"
                " traced model takes one shape. Use DataLoader(..., drop_last=True)."
            )


def _stages_of(model: nn.Module, paths: Sequence[str], x: Nest) -> list[nn.Module]:
    records = []
    modes: list[list[bool]] = []
    for training in (True, False):
        with switch_mode(model, training=training):
            modes.append([module.training for module in model.modules()])
            records.append(_record(model, paths, x))
    return [_Stage(model, modes, *both) for both in zip(*records, strict=True)]


def _record(model: nn.Module, paths: Sequence[str], x: Nest) -> list[nn.Module]:
    from torch.distributed.pipelining import SplitPoint, pipeline  # takes seconds to import

    settings = x if isinstance(x, dict) else {}
    marked = [model.get_submodule(path) for path in paths]
    before = [dict(module.__dict__) for module in marked]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own deprecations
            pipe = pipeline(
                model,
                () if settings else (x,),
                settings,
                split_spec=dict.fromkeys(paths, SplitPoint.BEGINNING),
            )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"torch.export cannot record this {type(model).__name__}: {reason}. Pass a list of"
            " modules, one per stage."
        ) from error
    finally:  # torch marks the split in the modules' own forward and leaves it there
        for module, attributes in zip(marked, before, strict=True):
            module.__dict__.clear()
            module.__dict__.update(attributes)
    if pipe.num_stages != len(paths) + 1:
        raise ConfigurationError(
            f"cuts={list(paths)} make {pipe.num_stages} stages in the order in which the modules"
            " are called: give each path once, in that order."
        )
    _undo_copies(model, pipe)
    return _route(pipe, list(settings))


def _undo_copies(model: nn.Module, pipe: Any) -> None:
    """Torch has given each stage a copy of a parameter that several use."""
    for part, name in (user for users in pipe.replicated_params for user in users.items()):
        owner, _, key = name.rpartition(".")
        setattr(
            pipe.split_gm.get_submodule(part).get_submodule(owner), key, model.get_parameter(name)
        )


class _Stage(nn.Module):
    """A stage's record of training and the one of evaluation, over the same weights."""

    def __init__(
        self,
        model: nn.Module,
        modes: Sequence[Sequence[bool]],
        training: nn.Module,
        evaluation: nn.Module,
    ) -> None:
        super().__init__()
        self.in_training, self.in_evaluation = training, evaluation
        # Not children: the model decides the mode and lends its weights.
        self._modules_of_model = tuple(model.modules())
        self._modes = [list(of_record) for of_record in modes]

    def forward(self, given: Nest) -> Nest:
        training = self._modules_of_model[0].training
        recorded = self._modes[0 if training else 1]
        if [module.training for module in self._modules_of_model] != recorded:
            self._refuse_modes(recorded)
        return (self.in_training if training else self.in_evaluation)(given)

    def _refuse_modes(self, recorded: Sequence[bool]) -> None:
        named = self._modules_of_model[0].named_modules()
        name, now = next(
            (name, module.training)
            for (name, module), was in zip(named, recorded, strict=True)
            if module.training != was
        )
        modes = "training", "evaluation"
        raise StageError(
            f"module {name!r} is in {modes[not now]} and was recorded in {modes[now]}: a traced"
            " model keeps the modes that its modules had at the first batch. Put it back with"
            f" .{'eval' if now else 'train'}(), or make a new Trainer."
        )


def _route(pipe: Any, names: Sequence[str]) -> list[nn.Module]:
    """Reads off the recorded graph what every stage takes, and from whom."""
    calls: list[tuple[nn.Module, list[str], str]] = []
    result = ""
    whence: dict[str, str] = {}
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            whence[node.name] = f"{_INPUT}.{node.name}" if names else _INPUT
        elif node.op == "call_module":
            module = pipe.split_gm.get_submodule(node.target)
            calls.append((module, [whence[a.name] for a in node.args], node.name))
            whence[node.name] = node.name
        elif node.target is operator.getitem:
            whence[node.name] = f"{whence[node.args[0].name]}.{node.args[1]}"
        elif node.op == "output":
            value = node.args[0]
            value = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
            if isinstance(value, (tuple, list)):
                raise ConfigurationError(
                    "a traced model must return one tensor or one stage's output as it is; this one"
                    " collects outputs of several stages. Pass a list of modules, one per stage."
                )
            result = whence[value.name]
    wanted_later = [
        {take for _, takes, _ in calls[k + 1 :] for take in takes} for k in range(len(calls))
    ]
    return [
        _Piece(module, takes, gives, keep, None if k < len(calls) - 1 else result)
        for k, ((module, takes, gives), keep) in enumerate(zip(calls, wanted_later, strict=True))
    ]


class _Piece(nn.Module):
    """One recorded stage: takes what it needs from the values under way, adds its own."""

    def __init__(
        self,
        module: nn.Module,
        takes: Sequence[str],
        gives: str,
        keep: set[str],
        result: str | None,
    ) -> None:
        super().__init__()
        self.module = module
        self._takes, self._gives, self._keep, self._result = list(takes), gives, keep, result
        self._shapes: tuple[torch.Size, ...] | None = None
        self._settings: str | None = None

    def _check_settings(self, batch: Nest) -> None:
        """What of a batch is no tensor is built in."""
        settings = repr(nest.replace(batch, lambda _: ...)).replace("Ellipsis", "...")
        self._settings = self._settings or settings
        if settings != self._settings:
            raise BatchError(
                f"this model was traced for batches like {self._settings} and was given one like"
                f" {settings}: a trace has numbers and words built in. Give what changes as a"
                " tensor."
            )

    def forward(self, given: Nest) -> Nest:
        first = not (isinstance(given, dict) and "offbeat" in given)
        values: dict[str, Any] = _name_parts(_INPUT, given) if first else dict(given["offbeat"])
        arguments = [values[name] for name in self._takes]
        self._shapes = self._shapes or _shapes_of(arguments)
        _check_shapes(self._shapes, arguments)
        if first:
            self._check_settings(given)
        values |= _name_parts(self._gives, self.module(*arguments))
        if self._result is not None:
            return values[self._result]
        return {"offbeat": {name: v for name, v in values.items() if name in self._keep}}


def _name_parts(name: str, value: Any) -> dict[str, Any]:
    """A value, and the entries of one that has several, under the names the graph uses."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, (tuple, list)):
        entries = enumerate(value)
    return {name: value} | {f"{name}.{key}": part for key, part in entries}
