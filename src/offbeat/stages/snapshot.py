"""What a stage holds between two steps, as plain values and tensors, and how it is put back.

A graph cannot be stored. What can be are the tensors it saved, because a hook has seen every one
(:mod:`offbeat.stages.versions`). To put a graph back the stage runs its forward again on the stored
input; what that computes does not matter, only the graph it builds, and for every tensor that the
new graph wants to save it is handed the stored one, in the same order:

    saved tensor             stored                         handed back
    -----------------------  -----------------------------  ------------------------------------
    a weight, newest         its number and a view          the parameter itself, or an alias
    a weight, older          the older values, once         the older values, shared as before
    a view of a buffer       its number and a view          a view of the stage's buffer
    anything else            itself                         itself

A graph may also hold what no hook sees: numbers that Python code took out of tensors, attributes of
custom autograd functions. Where these depend on weights the graph would come back different, so
the first snapshot of a stage looks for them (:func:`_refuse_hidden_state`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat import nest
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.stages.buffers import WrittenBuffers
from offbeat.stages.flight import Flight, Work
from offbeat.stages.state import FlightState, StageState, WorkState
from offbeat.stages.versions import (
    Graph,
    Saved,
    SavedActivation,
    SavedWeight,
    address_of,
    is_constant,
    nodes_of,
)

if TYPE_CHECKING:
    from offbeat.stages.stage import Stage

State = dict[str, Any]


# ------------------------------------------------------------------------- taking


def take(stage: "Stage") -> StageState:
    """All that later steps depend on. What the next one overwrites is copied, the rest shared."""
    memory = _Memory(stage)
    outdated = next((w.outdated for w in stage.flights.works() if w.outdated is not None), None)
    if outdated is not None:
        raise CheckpointError(
            f"stage {stage.index}: {outdated} was changed while a batch was in flight, whose graph"
            " has the old value built in and would be put back with the new one. Save before the"
            " change, a few steps later, or with drain=True; a value that changes often can be"
            " stored as a buffer."
        )
    if not stage.habits.rebuildable and any(work.outputs for work in stage.flights.works()):
        _refuse_hidden_state(stage, memory)
        stage.habits.rebuildable = True
    if any(work.hides for work in stage.flights.works()):
        raise _hidden(stage, "an activation checkpoint or a function of autograd keeps weights")
    if any(work.drawn is not None for work in stage.flights.works()):
        raise CheckpointError(
            f"stage {stage.index}: a batch in flight was the first to draw from Python's or NumPy's"
            " random numbers, and what it drew cannot be stored. Save with drain=True, or a few"
            " steps later."
        )
    flights = [_flight_state(stage, flight, memory) for flight in stage.flights.in_air.values()]
    return {
        "version": stage.version,
        "parameters": [parameter.detach().clone() for parameter in stage.parameters],
        "buffers": [buffer.detach().clone() for buffer in memory.buffers],
        "gradients": [None if p.grad is None else p.grad.clone() for p in stage.parameters],
        "optimizers": [
            {"kind": type(optimizer).__name__, "state": copied(optimizer.state_dict())}
            for optimizer in stage.optimizers
        ],
        "schedulers": [copied(scheduler.state_dict()) for scheduler in stage.schedulers],
        "old_versions": list(stage.old_versions.items()),
        "flights": apart(flights) if stage.runner.reuses_memory else flights,
        "landed": [_flight_state(stage, flight, memory) for flight in stage.flights.landed],
        "corrector": stage.corrector.snapshot(),
        "habits": dict(vars(stage.habits)),
        "peaks": [stage.flights.peak, stage.peak_versions],
    }


def copied(value: Any) -> Any:
    return nest.replace(value, lambda tensor: tensor.detach().clone())


def _flight_state(stage: "Stage", flight: Flight, memory: "_Memory") -> FlightState:
    judged = flight.judged
    return {
        "batch": flight.batch,
        "version": flight.version,
        "lent": flight.lent,
        "read": stage.corrector.words_of(flight.read),
        "judged": None if judged is None else list(judged),
        "work": None if flight.work is None else _work_state(flight.work, memory),
    }


def _work_state(work: Work, memory: "_Memory") -> WorkState:
    return {
        "given": work.given,
        "target": work.target,
        "scale": work.scale,
        # Under recompute there is no graph before the backward.
        "leaves": work.leaves,
        "saved": [memory.words(saved) for saved in work.graph.held()],
        "graph": bool(work.outputs),
    }


class _Memory:
    """A stage's own memory, by address: what of it a graph refers to."""

    def __init__(self, stage: "Stage") -> None:
        self.parameters = stage.parameters
        self.rule = stage.rule
        self.buffers = list(dict.fromkeys(b for m in stage.modules for b in m.buffers()))
        self._moves = not stage.runner.reuses_memory
        self._copies: dict[int, Tensor] = {}
        self._parameter_at = {id(p): number for number, p in enumerate(self.parameters)}
        self._buffer_at = {address_of(b): number for number, b in enumerate(self.buffers)}

    def today(self, parameter: nn.Parameter) -> Tensor:
        """A weight's values of now as a backward under the rule will see them."""
        if self.rule == "current":
            return parameter
        if self._moves:  # the next update leaves this storage behind
            return parameter.detach()
        return self._copies.setdefault(id(parameter), parameter.detach().clone())

    def words(self, saved: Saved | None) -> Any:
        """One entry of a graph, to be stored; None where autograd has let go of it."""
        if saved is None:
            return None
        if isinstance(saved, SavedWeight):
            newest = address_of(saved.source) == address_of(saved.parameter)
            return {
                "parameter": self._parameter_at[id(saved.parameter)],
                "older": None if newest else saved.source.detach(),
                "dtype": saved.dtype,
                "view": [list(saved.size), list(saved.stride), saved.offset],
            }
        tensor = saved.rebuild()
        number = self._buffer_at.get(address_of(tensor)) if _is_plain(tensor) else None
        if number is not None and tensor.numel():
            return {"buffer": number, "dtype": tensor.dtype, "view": _seen(tensor)}
        return {"activation": tensor}


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


# ------------------------------------------------------------------------- putting back


def put_back(stage: "Stage", state: StageState) -> None:
    """Makes a stage, which has begun the fill already, what it was when ``state`` was taken.

    Weights and buffers are written where they lie.
    """
    _refuse_other_optimizers(stage, state)
    stage.flights.clear()
    stage.old_versions.clear()
    memory = _Memory(stage)
    # One pass, so that what shared memory in the file shares it on the device; optimizers know
    # themselves where their state belongs.
    moved = on_device({k: v for k, v in state.items() if k != "optimizers"}, stage.device)
    state = cast(StageState, state | moved)
    _write(stage.parameters, state["parameters"], "parameter")
    _write(memory.buffers, state["buffers"], "buffer")
    for parameter, gradient in zip(stage.parameters, state["gradients"], strict=True):
        parameter.grad = gradient
    stage.version = state["version"]
    _restore_optimizers(stage, state["optimizers"])
    for scheduler, known in zip(stage.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(known)
    stage.old_versions.update(dict(state["old_versions"]))
    stage.corrector.restore(state["corrector"])
    vars(stage.habits).update(state["habits"])
    stage.flights.peak, stage.peak_versions = state["peaks"]
    with WrittenBuffers(stage.modules).restored():
        for words in state["flights"]:
            stage.flights.take_off(_flight_of(stage, words, memory))
    stage.flights.landed += [_flight_of(stage, words, memory) for words in state["landed"]]


def _refuse_other_optimizers(stage: "Stage", state: StageState) -> None:
    kinds = [type(optimizer).__name__ for optimizer in stage.optimizers]
    groups = [[len(g["params"]) for g in o.param_groups] for o in stage.optimizers]
    stored = [s["state"]["param_groups"] for s in state["optimizers"]]
    for what, theirs, ours in (
        ("state of", [s["kind"] for s in state["optimizers"]], kinds),
        ("parameter groups of", [[len(g["params"]) for g in one] for one in stored], groups),
        ("schedulers, in number", [len(state["schedulers"])], [len(stage.schedulers)]),
    ):
        if theirs != ours:
            there, here = (", ".join(map(str, each)) or "none" for each in (theirs, ours))
            raise ConfigurationError(
                f"the checkpoint has the {what} {there} for stage {stage.index}, and the trainer"
                f" was built with {here}: give it the same optimizer and scheduler."
            )


def on_device(state: State, device: torch.device) -> State:
    """The same on a device; what shares memory still does."""
    if device.type == "cpu":
        return state
    found: State = _elsewhere(state, lambda whole: whole.to(device))
    return found


def apart(state: Any) -> Any:
    """The same in memory of its own; what shares memory still does."""
    return _elsewhere(state, Tensor.clone)


def _elsewhere(state: Any, moved: Callable[[Tensor], Tensor]) -> Any:
    there: dict[int, Tensor] = {}

    def found(tensor: Tensor) -> Tensor:
        if not _is_plain(tensor):
            return moved(tensor.detach()).requires_grad_(tensor.requires_grad)
        place = address_of(tensor)
        if place not in there:
            bytes_of = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            there[place] = moved(bytes_of.set_(tensor.untyped_storage()))
        seen = torch.empty(0, dtype=tensor.dtype, device=there[place].device)
        seen.set_(there[place].untyped_storage(), tensor.storage_offset(), *_seen(tensor)[:2])
        return seen.requires_grad_(tensor.requires_grad)

    return nest.replace(state, found)


def _write(places: Sequence[Tensor], values: Sequence[Tensor], what: str) -> None:
    if [(p.shape, p.dtype) for p in places] != [(v.shape, v.dtype) for v in values]:
        raise ConfigurationError(
            f"the checkpoint has other {what}s than this stage ({len(values)} of them, here"
            f" {len(places)}, in their shapes and types): build the same model."
        )
    for place, value in zip(places, values, strict=True):
        place.data.copy_(value)


def _restore_optimizers(stage: "Stage", states: Sequence[State]) -> None:
    for optimizer, state in zip(stage.optimizers, states, strict=True):
        load_optimizer(optimizer, state["state"])


def load_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """``load_state_dict`` without its cast of every entry to the type of the weight."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for name, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device)


def _flight_of(stage: "Stage", state: FlightState, memory: _Memory) -> Flight:
    judged, work = state["judged"], state["work"]
    return Flight(
        batch=state["batch"],
        version=state["version"],
        lent=state["lent"],
        read=stage.corrector.read_of(state["read"]),
        judged=None if judged is None else (judged[0], judged[1]),
        work=None if work is None else _work_of(stage, state["batch"], work, memory),
    )


def _work_of(stage: "Stage", batch: int, state: WorkState, memory: _Memory) -> Work:
    work = Work(target=state["target"], scale=state["scale"], given=state["given"])
    work.penalized = stage.network.penalizes(batch)
    if state["graph"]:
        leaves = nest.detached(state["leaves"])
        work.leaves, work.inputs = leaves, nest.tensors(leaves)
        with _handing_back(stage, work.graph, state["saved"], memory):
            output, work.loss = stage.network.run(batch, work, leaves)
        work.outputs = nest.tensors(output)
    return work


@contextmanager
def _handing_back(
    stage: "Stage", graph: Graph, entries: Sequence[Any], memory: _Memory
) -> Iterator[None]:
    """Runs a forward whose graph gets the stored tensors in place of those it computes."""
    left = iter(entries)

    def pack(tensor: Tensor) -> Saved:
        entry = next(left, _NOTHING)
        saved = None if entry is _NOTHING else _saved(entry, tensor, memory)
        if saved is None:
            raise _changed(stage, f"wants to save a tensor of shape {tuple(tensor.shape)}")
        return graph.add(saved)

    with saved_tensors_hooks(pack, lambda saved: saved.rebuild()), torch.enable_grad():
        yield
    if next(left, _NOTHING) is not _NOTHING:
        raise _changed(stage, "saves fewer tensors")


_NOTHING = object()


def _saved(entry: Any, tensor: Tensor, memory: _Memory) -> Saved | None:
    """The stored tensor for the place of ``tensor``; None where it does not fit there."""
    if entry is None:  # nobody will ask for it
        return SavedActivation(tensor)
    if "activation" in entry:
        found: Tensor = entry["activation"]
        fits = (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        return SavedActivation(found) if fits else None
    if (_seen(tensor), tensor.dtype) != (entry["view"], entry["dtype"]):
        return None
    if "buffer" in entry:
        return SavedActivation(memory.buffers[entry["buffer"]].as_strided(*entry["view"]))
    parameter, source = memory.parameters[entry["parameter"]], entry["older"]
    return SavedWeight(parameter, memory.today(parameter) if source is None else source, tensor)


def _seen(tensor: Tensor) -> list[Any]:
    """Which part of its storage a tensor is."""
    return [list(tensor.size()), list(tensor.stride()), tensor.storage_offset()]


def _changed(stage: "Stage", what: str) -> CheckpointError:
    return CheckpointError(
        f"stage {stage.index}: run again on the input it had, its forward {what} that the"
        " checkpoint has no place for. Its code or its settings are others than when the checkpoint"
        " was made, or it branches on values. Use the old code, or a checkpoint saved with"
        " drain=True."
    )


# ------------------------------------------------------------------------- what hooks cannot see


def _refuse_hidden_state(stage: "Stage", memory: _Memory) -> None:
    """Builds one graph in flight a second time and looks for what was not saved by hooks."""
    flights = stage.flights.in_air.values()
    flight = next(flight for flight in flights if flight.work and flight.work.outputs)
    work = flight.work
    assert work is not None
    state = _work_state(work, memory)
    watch = _Watch([*stage.parameters, *memory.buffers])
    with WrittenBuffers(stage.modules).restored(), watch:
        again = _work_of(stage, flight.batch, state, memory)
    if watch.found is not None:
        raise _hidden(
            stage, f"{watch.found} takes numbers out of tensors that depend on its weights"
        )
    ours, theirs = _attributes(work), _attributes(again)
    for (name, values), (_, others) in zip(ours, theirs, strict=True):
        odd = [k for k, v in values.items() if not is_constant(v) or v != others.get(k)]
        if odd:
            raise _hidden(stage, f"{name} keeps {', '.join(odd)} as an attribute of its own")


def _hidden(stage: "Stage", what: str) -> CheckpointError:
    return CheckpointError(
        f"stage {stage.index}: {what}, where no hook on saved tensors can see it, so its graphs in"
        " flight could not be put back exactly. Save with drain=True, use backward='recompute', or"
        " hand it to ctx.save_for_backward."
    )


class _Watch(TorchDispatchMode):
    """Finds operations that make numbers, sizes or branches of values that weights had a say in."""

    def __init__(self, state: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self._moving = {address_of(tensor) for tensor in state}
        self._alive: list[Tensor] = []  # so that no address is used twice while we watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [t for t in nest.tensors([args, kwargs]) if _is_plain(t)]
        if any(address_of(tensor) in self._moving for tensor in read):
            if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
                self.found = self.found or str(func)
            made = [t for t in nest.tensors(result) if _is_plain(t)]
            self._alive += made
            self._moving |= {address_of(tensor) for tensor in made}
        return result


def _attributes(work: Work) -> list[tuple[str, dict[str, Any]]]:
    """What custom autograd functions keep beside saved tensors, in the order of the graph."""
    ends = [*work.outputs, *([] if work.loss is None else [work.loss])]
    custom = (node for node in nodes_of(ends) if isinstance(node, BackwardCFunction))
    return [(node.name(), dict(vars(node))) for node in custom]
