"""Any model with a list of blocks that hand a hidden state to each other.

Most large models are a prefix (embeddings), a ``ModuleList`` of like blocks, and a suffix (norm,
head), written as one ``forward``. It is cut between blocks without touching that code:

- the first stage runs the model's own ``forward`` through doors in the place of its blocks, which
  note what each is called with, and leaves it at the last; what they noted is the message;
- every stage calls its blocks one after the other, as was noted;
- the last stage then runs the model's ``forward`` with stand-ins before the blocks, and what its
  last block has returned in the place of that, so that the suffix sees the real one.

This is right only for models that use what a block returns for nothing but to call the next ones,
and in which the suffix uses nothing of the prefix. Doors and stand-ins refuse others, in the batch
in which they show; ``compare.py`` looks for what is hidden from both in the first batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.cutting.balance import cut_by_costs
from offbeat.cutting.compare import Trial, explain_failure
from offbeat.cutting.costs import Spans, cut_by_count
from offbeat.cutting.cut import Balance, Cut, Wish, check_places
from offbeat.cutting.doors import Call, Door, Journey, OnCall, Reached, first_of, read_calls
from offbeat.cutting.ends import Ends, look_for_ends
from offbeat.cutting.stand_ins import StandIn
from offbeat.cutting.traced import TracedCut
from offbeat.errors import ConfigurationError, StageError
from offbeat.nest import Nest
from offbeat.stages.attributes import GONE, Change, rebound
from offbeat.stages.compiled import uncompiled
from offbeat.stages.trial import call


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
        if path is None or {*found} - {path}:
            return None
        blocks = len(lists[path])
        if wish.cuts is None and wish.count > blocks:
            return None
        places = None
        if wish.cuts is not None:
            numbers = (c.rpartition(".")[2] if isinstance(c, str) else c for c in wish.cuts)
            places = check_places([int(number) for number in numbers], blocks)
        return cls(model=model, stages=wish.count, places=places, path=path)

    def make(self, batch: Nest, balance: Balance) -> "BlocksCut":
        model, found = self.model, list[Ends]()
        blocks = len(list(model.get_submodule(self.path).children()))
        spans = Spans(model, [f"{self.path}.{number}" for number in range(blocks)])
        look = partial(look_for_ends, model, self.path, batch, found)
        trial = Trial(model, batch, first=spans.counted, look=look, light=self.absent is not None)
        # Of the smallest pieces: a block each, with the prefix or the suffix at an end.
        ends, costs = found[-1], [*spans.of_each().values()]
        costs[-1] += spans.before  # the last stage runs the prefix again
        places = self.places
        if places is None and balance is cut_by_count:
            places = tuple(cut_by_costs(costs, self.stages))
        elif places is None:
            pieces = _stages_of(model, ends, range(1, blocks))
            with explain_failure(model, self.path):
                places = tuple(balance(pieces, batch, self.stages))
        numbers = [int(place) for place in places]
        stages = _stages_of(model, ends, numbers)
        trial.compare(stages, self.path)
        sums = tuple(sum(costs[a:b]) for a, b in pairwise([0, *numbers, blocks]))
        return replace(self, places=places, modules=tuple(stages), costs=sums)

    def otherwise(self) -> TracedCut:
        paths = self.places and tuple(f"{self.path}.{place}" for place in self.places)
        return TracedCut(model=self.model, stages=self.stages, places=paths, absent=self.absent)

    def follow(self, changes: Sequence[Change]) -> None:
        for stage in self.modules:
            if isinstance(stage, _First | _Last):
                for change in changes:
                    stage.body.follow(change)


def _find_list(
    model: nn.Module, lists: dict[str, nn.ModuleList], path: str, longest: str
) -> str | None:
    """The path of the list that a block is in; None for another module."""
    owner, _, number = path.rpartition(".")
    if owner in lists and number.isdigit() and int(number) < len(lists[owner]):
        return owner
    if path in dict(model.named_modules()):
        return None
    raise ConfigurationError(
        f"cuts: {path!r} is not a block of this {type(model).__name__}. A stage begins at a block"
        f" of a ModuleList: here {longest}.1 to {longest}.{len(lists[longest]) - 1}."
    )


def _stages_of(model: nn.Module, ends: Ends, places: Sequence[int]) -> list[nn.Module]:
    """The stages of a model of which the later ones begin at these blocks."""
    own = [range(*span) for span in pairwise([0, *places, len(ends.outputs)])]
    middle = [_Middle(model, ends, numbers) for numbers in own[1:-1]]
    return [_First(model, ends, own[0]), *middle, _Last(model, ends, own[-1])]


class _Body:
    """A copy of a model's frame around its own submodules, with other blocks and fewer weights.

    Modules are copied without their tensors. A parameter that belongs to another stage becomes a
    plain attribute: a stand-in that takes no memory. So does a buffer, a copy of it: what runs
    here for nothing may write it. One that is never written stays the model's.
    """

    def __init__(self, model: nn.Module, ends: Ends, on_call: OnCall, *, first: bool) -> None:
        self._frames: list[tuple[nn.Module, nn.Module, bool]] = []
        """Of each module, and whether it has run to its end before the blocks."""
        self._ends, self._first = ends, first
        self._on_call, self._called = on_call, 0
        self._constants: list[tuple[str, Tensor]] = []
        self._strange: dict[int, StandIn] = {
            id(parameter): _stand_in_for(name, parameter, first=first)
            for name, parameter in model.named_parameters()
            if (id(parameter) in ends.early_weights) != first
        }
        blocks = model.get_submodule(ends.path)
        doors = [Door(block, partial(self._at, n)) for n, block in enumerate(blocks.children())]
        # By id, so that what has two names stays one.
        copies: dict[int, nn.Module] = {id(blocks): nn.ModuleList(doors)}
        self.module = self._copy(model, copies)

    def _copy(self, module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        # As copy.copy(), which parametrized modules refuse; without what model.compile() has made.
        state: dict[str, Any] = dict(nn.Module.__getstate__(module))
        parameters, buffers = dict(state["_parameters"]), state["_buffers"]
        strange = {
            id(parameter): self._strange[id(parameter)]
            for key, parameter in parameters.items()
            if id(parameter) in self._strange
            and (self._first or (id(module), key) not in self._ends.lent)
        }
        for key, value in state.items():
            if type(value) is list:  # such as the weights of an nn.LSTM in their order
                state[key] = [strange.get(id(part), part) for part in value]
        for key, parameter in state["_parameters"].items():
            if id(parameter) in strange:
                state[key] = strange[id(parameters.pop(key))]
        for key, buffer in buffers.items():
            if buffer is not None and (id(module), key) in self._ends.constants:
                self._constants.append((f"{type(module).__name__}.{key}", buffer))
        # Else the very dict: a forward that assigns a buffer anew assigns the model's.
        if (id(module) in self._ends.early_buffers) != self._first:
            for key, buffer in buffers.items():
                constant = buffer is None or (id(module), key) in self._ends.constants
                name = f"{type(module).__name__}.{key}"
                state[key] = buffer if constant else _stand_in_for(name, buffer, first=self._first)
            buffers = {}
        children = state["_modules"].items()
        modules = {k: None if child is None else self._copy(child, copies) for k, child in children}
        frame: nn.Module = object.__new__(type(module))
        state = {name: rebound(name, value, module, frame) for name, value in state.items()}
        frame.__dict__.update(state, _parameters=parameters, _buffers=buffers, _modules=modules)
        copies[id(module)] = frame
        self._frames.append((module, frame, id(module) in self._ends.early_modules))
        return frame

    def __call__(self, x: Nest) -> Nest:
        # In the last stage the prefix runs for nothing, and must draw no random numbers.
        self.follow_modes(asleep=not self._first)
        before, self._called = self._versions(), 0
        try:
            return call(self.module, x)
        finally:
            pairs = zip(self._constants, before, self._versions(), strict=True)
            for (name, _), version, now in pairs:
                if version != now:
                    raise StageError(
                        f"buffer {name!r} is written in this batch and was not in the first, so"
                        " both ends of the model have it. Let the first batch write it, or pass a"
                        " list of modules, one per stage."
                    )

    def _at(self, number: int, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        if number != self._called:
            raise StageError(
                f"block {number} is called when {self._called} blocks have been: every block must"
                " run once, in their order. Pass a list of modules, one per stage."
            )
        self._called += 1
        return self._on_call(number, arguments, settings)

    def _versions(self) -> list[int]:
        return [buffer._version for _, buffer in self._constants]

    def follow(self, change: Change) -> None:
        """Hooks and whatever else lies deeper are the model's own."""
        for module, frame, _ in self._frames:
            held = frame.__dict__
            own = not change.part and change.name != "training"
            buffer = change.part == "_buffers" and change.name in held
            if module is not change.module or not (own or buffer):
                continue
            if isinstance(held.get(change.name), StandIn):
                continue  # the other end's
            if change.name == "forward":
                raise ConfigurationError(
                    f"{change} was replaced after this {type(self.module).__name__} was cut, and"
                    " what it sets, such as mixed precision, may not reach other stages. Build a"
                    " new Trainer, which compares; mixed precision is"
                    " Trainer(autocast=torch.bfloat16). The batch was not started."
                )
            held.pop(change.name, None)
            if change.now is not GONE:
                held[change.name] = rebound(change.name, change.now, module, frame)

    def follow_modes(self, *, asleep: bool) -> None:
        for module, frame, early in self._frames:  # train() and eval() are called on the original
            frame.training = module.training and not (asleep and early)


def _stand_in_for(name: str, tensor: Tensor, *, first: bool) -> StandIn:
    """In the first stage or the last, for a parameter or buffer that belongs to the other end."""
    weight = isinstance(tensor, nn.Parameter)
    values = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    what, here, there = ("parameter" if weight else "buffer"), "before", "behind"
    if not first:
        here, there = there, here
    return StandIn.of(
        values if weight else tensor.clone(),
        f"{what} {name!r}, or something made of it, is used {here} the blocks, but belongs to the"
        f" stage {there} them. A weight goes where the first batch uses it or, if that does not,"
        " where it is registered, before the blocks or behind them: let the first batch use all"
        " weights as later ones do, or pass a list of modules, one per stage.",
    )


class _Middle(nn.Module):
    """Some blocks, one after the other."""

    def __init__(self, model: nn.Module, ends: Ends, own: range) -> None:
        super().__init__()
        blocks = list(model.get_submodule(ends.path).children())
        self.blocks = nn.ModuleList([blocks[number] for number in own])
        self._own = own
        self._returns = [_plain_of(ends.outputs[number]) for number in own]

    def forward(self, given: Nest) -> Nest:
        calls, needed = read_calls(given["calls"], self._own)
        _, values = self._run(calls, given["values"])
        kept = [value if place in needed else None for place, value in enumerate(values)]
        return {**given, "values": kept}

    def _run(self, calls: list[Call], given: list[Any]) -> tuple[Any, list[Any]]:
        """What the last of the blocks returns, and all values."""
        output, values = None, list(given)
        for block, how, returns in zip(self.blocks, calls, self._returns, strict=True):
            arguments = [values[place] for place in how.arguments]
            settings = {name: values[place] for name, place in how.settings.items()}
            output = block(*arguments, **settings)
            if _plain_of(output) != returns:
                raise StageError(
                    f"a {type(block).__name__} returned {returns} in the first batch, with"
                    f" Ellipsis for tensors, and now {_plain_of(output)}: what changes must be a"
                    " tensor. Or pass a list of modules, one per stage."
                )
            found = zip(how.results, how.asked, nest.tensors(output), strict=True)
            for place, asked, tensor in found:
                if asked and _kind_of(tensor) != _kind_of(first_of(arguments, settings)):
                    raise StageError(
                        "the model's forward asks for the shape or type of what a"
                        f" {type(block).__name__} returns, and it is not that of its first"
                        " argument. Pass a list of modules, one per stage."
                    )
                if place is not None:
                    values[place] = tensor
        return output, values


def _plain_of(output: Nest) -> Nest:
    return nest.replace(output, lambda _: ...)


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


class _First(_Middle):
    """The first blocks, and before them the model's own forward.

    That goes on to the last block, through doors, so it says of each batch what blocks are called
    with.
    """

    def __init__(self, model: nn.Module, ends: Ends, own: range) -> None:
        super().__init__(model, ends, own)
        self.body = _Body(model, ends, self._pass, first=True)
        blocks = self.blocks
        del self.blocks
        self.frame, self.blocks = self.body.module, blocks  # so are their parameters in order
        self._outputs, self._journey = ends.outputs, Journey()

    def forward(self, x: Nest) -> Nest:
        return super().forward(self._depart(x))

    @uncompiled
    def _depart(self, x: Nest) -> Nest:
        self._journey = Journey()
        try:
            self.body(x)
        except Reached:
            return self._journey.message(x)
        finally:
            self._journey = Journey()
        raise StageError(
            f"the model's forward ended before its block {len(self._outputs) - 1}, and every block"
            " must run once. Pass a list of modules, one per stage."
        )

    def _pass(self, number: int, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        output = self._journey.call(arguments, settings, self._outputs[number])
        if number == len(self._outputs) - 1:
            raise Reached
        return output


class _Last(_Middle):
    """The last blocks, and behind them the model's own forward."""

    def __init__(self, model: nn.Module, ends: Ends, own: range) -> None:
        super().__init__(model, ends, own)
        self.body = _Body(model, ends, self._pass, first=False)
        self.frame = self.body.module
        self._outputs = ends.outputs
        self._arrived: tuple[Any, list[Any]] = (None, [])
        """What the last block has returned, and been called with."""

    def forward(self, given: Nest) -> Nest:
        calls, _ = read_calls(given["calls"], self._own)
        output, values = self._run(calls, given["values"])
        places = [*calls[-1].arguments, *calls[-1].settings.values()]
        return self._arrive(given["x"], output, [values[place] for place in places])

    @uncompiled
    def _arrive(self, x: Nest, output: Any, known: list[Any]) -> Nest:
        self._arrived = output, known
        try:
            return StandIn.without(self.body(x))
        finally:
            StandIn.conceal()
            self._arrived = None, []

    def _pass(self, number: int, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        given = [*arguments, *settings.values()]
        if number < self._own.stop - 1:
            why = (
                "what a block was called with or returned is used behind the blocks, where only"
                " that of the last one is known. Pass a list of modules, one per stage."
            )
            like = first_of(given)
            return nest.replace(self._outputs[number], lambda _: StandIn.of(like, why))
        self.body.follow_modes(asleep=False)  # the prefix is over: what ran in it may run again
        output, known = self._arrived
        StandIn.reveal(given, known)
        return output
