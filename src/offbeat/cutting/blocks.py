"""Any model with a list of blocks that hand a hidden state to each other.

Most large models are a prefix (embeddings), a ``ModuleList`` of like blocks, and a suffix (norm,
head), written as one ``forward``. It is cut between blocks without touching that code:

- the first stage runs the model's own ``forward`` and leaves it where the next stage's first block
  would be called; what that block would be called with is the message;
- a stage in the middle calls its blocks one after the other;
- the last stage calls its blocks, then runs the model's ``forward`` with weightless stand-ins
  before the blocks and the finished hidden state in their place, so that the suffix sees the real
  one.

This is right only for models in which blocks hand each other nothing but the hidden state, and in
which the suffix uses nothing of the prefix; ``compare.py`` refuses others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import nn

from offbeat.cutting.compare import compare_with_whole, explain_failure, find_loan
from offbeat.cutting.cut import Balance, Cut, Wish, check_places
from offbeat.cutting.ends import Ends, find_ends, hidden_of
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest
from offbeat.stages.attributes import GONE, Change
from offbeat.stages.trial import call, leave_untouched


@dataclass(frozen=True, kw_only=True)
class BlocksCut(Cut):
    path: str
    """Of the list of blocks."""

    @classmethod
    def plan(cls, wish: Wish) -> "BlocksCut | None":
        model = wish.model
        if not isinstance(model, nn.Module):
            return None
        paths = [cut for cut in wish.cuts or () if isinstance(cut, str)]
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) > 1
        }
        if not lists or (paths and paths[0].rpartition(".")[0] not in lists):
            return None
        longest = max(lists, key=lambda name: len(lists[name]))
        found = [_find_list(model, lists, path, longest) for path in paths]
        path = found[0] if found else longest
        blocks = len(lists[path])
        if wish.count > blocks:
            raise ConfigurationError(
                f"{wish.count} stages, but {path} has {blocks} blocks: give at most {blocks}"
                " stages."
            )
        for cut, other in zip(paths, found, strict=True):
            if other != path:
                raise ConfigurationError(
                    f"cuts: {paths[0]!r} and {cut!r} are blocks of different lists; all stages"
                    " begin at blocks of one."
                )
        places = None
        if wish.cuts is not None:
            numbers = (c.rpartition(".")[2] if isinstance(c, str) else c for c in wish.cuts)
            places = check_places([int(number) for number in numbers], blocks)
        return cls(model=model, stages=wish.count, places=places, path=path)

    def make(self, batch: Nest, balance: Balance) -> "BlocksCut":
        lend = find_loan(self.model, batch)
        with lend(), leave_untouched([self.model]):
            ends = find_ends(self.model, self.path, batch)
        places = self.places
        if places is None:
            blocks = len(list(self.model.get_submodule(self.path).children()))
            # The smallest pieces: a block each, with the prefix or the suffix at an end.
            pieces = _stages_of(self.model, ends, range(1, blocks))
            with explain_failure(self.model, self.path):
                places = tuple(balance(pieces, batch, self.stages))
        stages = _stages_of(self.model, ends, [int(place) for place in places])
        compare_with_whole(self.model, stages, batch, self.path, lend)
        return replace(self, places=places, modules=tuple(stages))

    def follow(self, changes: Sequence[Change]) -> None:
        for stage in self.modules:
            if isinstance(stage, (_First, _Last)):
                for change in changes:
                    stage.body.follow(change)


def _find_list(model: nn.Module, lists: dict[str, nn.ModuleList], path: str, longest: str) -> str:
    """The path of the list that a block is in."""
    owner, _, number = path.rpartition(".")
    if owner in lists and number.isdigit() and int(number) < len(lists[owner]):
        return owner
    raise ConfigurationError(
        f"cuts: {path!r} is not a block of this {type(model).__name__}. A stage begins at a block"
        f" of a ModuleList: here {longest}.1 to {longest}.{len(lists[longest]) - 1}."
    )


def _stages_of(model: nn.Module, ends: Ends, places: Sequence[int]) -> list[nn.Module]:
    """The stages of a model of which the later ones begin at these blocks."""
    blocks = list(model.get_submodule(ends.path).children())
    stages: list[nn.Module] = [_First(model, ends, blocks[: places[0]])]
    for begin, end in pairwise(places):
        stages.append(_Middle(blocks[begin:end]))
    return [*stages, _Last(model, ends, blocks[places[-1] :])]


class _Reached(Exception):
    """Leaves a forward where the next stage begins, with what its block would be called with."""


def _leave(*arguments: Any, **settings: Any) -> None:
    raise _Reached(arguments, settings)


class _Door(nn.Module):
    """Stands in a model's frame where blocks of other stages were, and does something else."""

    def __init__(self, on_call: Callable[..., Any]) -> None:
        super().__init__()
        self._on_call = on_call

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        return self._on_call(*arguments, **settings)


class _Body:
    """A copy of a model's frame around its own submodules, with other blocks and fewer weights.

    Modules are copied without their tensors. A parameter that belongs to another stage becomes a
    plain attribute: zeros that take no memory. So does a buffer, which becomes a copy: what runs
    here for nothing may write it. One that is never written stays the model's.
    """

    def __init__(self, model: nn.Module, ends: Ends, blocks: nn.Module, *, first: bool) -> None:
        self._frames: list[tuple[nn.Module, nn.Module, bool]] = []
        """Of each module, and whether it has run to its end before the blocks."""
        self._ends, self._first = ends, first
        # By id, so that what has two names stays one.
        copies = {id(model.get_submodule(ends.path)): blocks}
        self.module = self._copy(model, copies)

    def _copy(self, module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        # As copy.copy(), which parametrized modules refuse; without what model.compile() has made.
        state = nn.Module.__getstate__(module)
        parameters, buffers = dict(state["_parameters"]), state["_buffers"]
        for key, parameter in state["_parameters"].items():
            early = id(parameter) in self._ends.early_weights
            if parameter is not None and early != self._first:
                stand_in = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                state[key] = stand_in.expand(parameters.pop(key).shape)
        # Else the very dict: a forward that assigns a buffer anew assigns the model's.
        if (id(module) in self._ends.early_buffers) != self._first:
            for key, buffer in buffers.items():
                constant = buffer is None or (id(module), key) in self._ends.constants
                state[key] = buffer if constant else buffer.clone()
            buffers = {}
        children = state["_modules"].items()
        modules = {k: None if child is None else self._copy(child, copies) for k, child in children}
        frame: nn.Module = object.__new__(type(module))
        state = {name: _rebound(name, value, module, frame) for name, value in state.items()}
        frame.__dict__.update(state, _parameters=parameters, _buffers=buffers, _modules=modules)
        copies[id(module)] = frame
        self._frames.append((module, frame, id(module) in self._ends.early_modules))
        return frame

    def __call__(self, x: Nest) -> Nest:
        # In the last stage the prefix runs for nothing, and must draw no random numbers.
        self.follow_modes(asleep=not self._first)
        return call(self.module, x)

    def follow(self, change: Change) -> None:
        """Hooks and whatever else lies deeper are the model's own."""
        for module, frame, _ in self._frames:
            held = frame.__dict__
            own = not change.part and change.name != "training"
            buffer = change.part == "_buffers" and change.name in held
            if module is not change.module or not (own or buffer):
                continue
            if change.name == "forward":
                raise ConfigurationError(
                    f"{change} was replaced after this {type(self.module).__name__} was cut, and"
                    " what it sets, such as mixed precision, may not reach other stages. Build a"
                    " new Trainer, which compares; mixed precision is"
                    " Trainer(autocast=torch.bfloat16). The batch was not started."
                )
            held.pop(change.name, None)
            if change.now is not GONE:
                held[change.name] = _rebound(change.name, change.now, module, frame)

    def follow_modes(self, *, asleep: bool) -> None:
        for module, frame, early in self._frames:  # train() and eval() are called on the original
            frame.training = module.training and not (asleep and early)


def _rebound(name: str, value: Any, module: nn.Module, frame: nn.Module) -> Any:
    """An attribute of a module as its frame has it: a method put on the instance is the frame's."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, frame)
    if name == "forward":
        raise ConfigurationError(
            f"the forward of a {type(module).__name__} was replaced on the instance, by a"
            f" {type(value).__name__} that would run the whole model in every stage. Replace it by"
            " types.MethodType(function, module) or in its class; mixed precision is"
            " Trainer(autocast=torch.bfloat16), with the model as it was before."
        )
    return value


class _First(nn.Module):
    """Everything up to the first cut, by the model's own forward."""

    def __init__(self, model: nn.Module, ends: Ends, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        until = nn.ModuleList([*blocks, _Door(_leave)])
        self.body = _Body(model, ends, until, first=True)
        self.frame = self.body.module

    def forward(self, x: Nest) -> Nest:
        try:
            self.body(x)
        except _Reached as reached:
            (hidden, *rest), settings = reached.args
            return {"x": x, "hidden": hidden, "rest": rest, "settings": settings}
        raise ConfigurationError("the model's forward did not come to its blocks in this batch.")


class _Middle(nn.Module):
    """Some blocks, one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, given: Nest) -> Nest:
        return {**given, "hidden": hidden_of(self._run(given))}

    def _run(self, given: Nest) -> Any:
        """What the last of the blocks returns."""
        output = given["hidden"]
        for block in self.blocks:
            output = block(hidden_of(output), *given["rest"], **given["settings"])
        return output


class _Last(_Middle):
    """The last blocks, and the rest of the model's forward."""

    def __init__(self, model: nn.Module, ends: Ends, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.body = _Body(model, ends, nn.ModuleList([_Door(self._hand_out)]), first=False)
        self.frame = self.body.module
        self._output: Any = None

    def forward(self, given: Nest) -> Nest:
        self._output = self._run(given)
        return self.body(given["x"])

    def _hand_out(self, *_: Any, **__: Any) -> Any:
        """What the last block has returned, where the model's forward would call the blocks."""
        self.body.follow_modes(asleep=False)  # the prefix is over: what ran in it may run again
        output, self._output = self._output, None
        return output
