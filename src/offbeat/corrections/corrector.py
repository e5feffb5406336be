"""All corrections of one stage, called by it at three points: forward, backward, update."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from offbeat.corrections.base import Correction, Hook, Moment, Surroundings
from offbeat.corrections.groups import Group, Tensors, groups_of
from offbeat.corrections.seen import ReadWeights
from offbeat.errors import ConfigurationError
from offbeat.monitors.monitor import Monitor
from offbeat.monitors.staleness import Watch
from offbeat.records.readings import What


@dataclass(frozen=True, kw_only=True)
class Fill:
    """What a method decides about one stage, from one fill of the pipe to its drain."""

    lag: int
    """The largest of the stage, in updates."""
    micro_batches: int
    first_batch: int
    """The number of the fill's first micro-batch."""
    first_update: int
    """The version of the stage's weights when it starts."""


@dataclass(frozen=True)
class _Flight:
    """A micro-batch between its forward and the update that applies its gradient."""

    version: int
    weights: Tensors | None
    """What its forward read, where a correction asks for it later."""
    judged: tuple[Tensor, Tensor] | None
    """Of the weights predicted for it, and those it would have read, what the monitor compares."""


class Corrector:
    """Knows every micro-batch's lag and lets the corrections act on it; inactive without lag.

    Order within an update: gradients are changed, the optimizer steps with the rate and momentum by
    lag, the step is changed, everything is observed. Corrections of one kind act in the order in
    which they were given.
    """

    def __init__(
        self,
        corrections: Sequence[Correction] = (),
        *,
        stage: int = 0,
        stages: int = 1,
        parameters: Sequence[nn.Parameter] = (),
        monitor: Monitor | None = None,
    ) -> None:
        self._corrections = corrections
        self._monitor = monitor
        self._watch: Watch | None = None
        self._last_read: int | None = None
        """The version at which the monitor was last read."""
        self._stage = stage
        self._stages = stages
        self._parameters = tuple(parameters)
        self._fill: Fill | None = None
        self._hooks: list[Hook] = []
        self.made = 0
        """How often hooks have been made: each time with new memory."""
        self._groups: list[Group] = []
        self._read: ReadWeights | None = None
        self._before: Tensors | None = None
        self._flights: dict[int, _Flight] = {}
        self._applied: list[_Flight] = []
        """Micro-batches whose gradients the next update applies."""
        self._predicted: dict[tuple[int, int], Tensors | None] = {}
        """Forward weights by version read and lag: the micro-batches of one step share them."""
        self._loaded: dict[str, Any] = {}
        """What was loaded, until the next fill begins."""

    def begin(self, fill: Fill, optimizers: Sequence[Optimizer]) -> None:
        """Makes ready for a fill; hooks live on from the last one if nothing else has changed."""
        before, self._fill = self._fill, fill
        self.forget_flights()
        idle = not self._corrections and self._monitor is None
        if fill.lag == 0 or not self._parameters or idle:
            self._drop_hooks()
            return
        sizes = (fill.lag, fill.micro_batches)
        if not self._hooks or before is None or sizes != (before.lag, before.micro_batches):
            self._make_hooks(fill, optimizers)
        if self._loaded:
            self._take_loaded()

    def refuse_unfit(self, lag: int, optimizers: Sequence[Optimizer]) -> None:
        """Raises what corrections have against these optimizers, at a lag that is to come."""
        if lag and self._parameters:
            around = self._surroundings(lag, groups_of(optimizers))
            sparse = any(isinstance(optimizer, SparseAdam) for optimizer in optimizers)
            lenders: dict[str, str] = {}
            for correction in self._corrections:
                hook = correction.hook(around)
                for point in ("forward_weights", "backward_weights"):
                    if _overrides(hook, point):
                        other = lenders.setdefault(point, correction.name)
                        if other != correction.name:
                            raise ConfigurationError(
                                f"{other} and {correction.name} both choose the"
                                f" {point.replace('_', ' ')}, and a stage can have those of one"
                                " only: leave the other out."
                            )
                if sparse and _overrides(hook, "gradients"):
                    raise ConfigurationError(
                        f"{correction.name} goes through gradients element by element, and"
                        f" SparseAdam of stage {self._stage} takes sparse ones only. Use"
                        " nn.Embedding(..., sparse=False) with Adam, or leave it out."
                    )

    def _surroundings(self, lag: int, groups: Sequence[Group]) -> Surroundings:
        return Surroundings(
            stage=self._stage,
            stages=self._stages,
            lag=lag,
            parameters=self._parameters,
            groups=groups,
        )

    def _make_hooks(self, fill: Fill, optimizers: Sequence[Optimizer]) -> None:
        self._groups = groups_of(optimizers)
        self.made += 1
        around = self._surroundings(fill.lag, self._groups)
        self._hooks = [correction.hook(around) for correction in self._corrections]
        self._watch = None if self._monitor is None else Watch(self._monitor, around)
        if self._watch is not None:  # first, so that it sees gradients as they arrive
            self._hooks.insert(0, self._watch)
        self._read = self._before = None
        if any(hook.needs_read for hook in self._hooks):
            self._read = ReadWeights(self._parameters, fill.lag, fill.micro_batches)
        if any(hook.needs_before for hook in self._hooks):
            self._before = tuple(torch.zeros_like(p) for p in self._parameters)

    @property
    def active(self) -> bool:
        return bool(self._hooks)

    @property
    def predicts(self) -> bool:
        """Whether forwards use other weights than the newest."""
        return any(_overrides(hook, "forward_weights") for hook in self._hooks)

    @property
    def rewinds(self) -> bool:
        """Whether backwards use other weights than those of their rule."""
        return any(_overrides(hook, "backward_weights") for hook in self._hooks)

    @property
    def acts_forward(self) -> bool:
        """Whether a forward has more to do than the network's own work."""
        return self.predicts or (self.active and self._read is not None)

    @property
    def repeats(self) -> bool:
        """Whether updates of one lag are the same work each time."""
        if not self.active:
            return True
        watched = self._read is not None or self._watch is not None
        return not watched and all(hook.repeats for hook in self._hooks)

    def lag_at(self, version: int) -> int:
        """Of the update that ends ``version``: the largest of the micro-batches it applies."""
        return max((version - flight.version for flight in self._applied), default=0)

    @property
    def shrinkage(self) -> float:
        """Factor on the gradients that arrive."""
        factor = 1.0
        lags = self._fill is not None and self._fill.lag > 0
        for correction in self._corrections if lags else ():
            factor *= correction.shrinkage
        return factor

    # ---------------------------------------------------------------- the three points

    def forward_weights(
        self, batch: int, version: int, newest: int, values: Sequence[Tensor] | None
    ) -> Sequence[Tensor] | None:
        """The weights to go forward with; ``values``, None for the stage's own, if unchanged.

        ``version`` is read while ``newest`` is the stage's own.
        """
        if not self.active:
            return values
        assert self._fill is not None
        step = (batch - self._fill.first_batch) // self._fill.micro_batches
        lag = self._fill.first_update + step - version
        if (version, lag) not in self._predicted:
            self._predicted[version, lag] = self._predict(Moment(lag, newest))
        predicted = self._predicted[version, lag]
        used = values if predicted is None else predicted
        kept: Tensors | None = None
        if self._read is not None:
            kept = self._read.keep(version, values) if predicted is None else predicted
        judged = None
        if self._watch is not None and predicted is not None:
            own = self._parameters if values is None else tuple(values)
            judged = (self._watch.sample.of(predicted), self._watch.sample.of(own))
        self._flights[batch] = _Flight(version, kept, judged)
        return used

    def _predict(self, moment: Moment) -> Tensors | None:
        with torch.no_grad(), self._tuned(moment):
            for hook in self._hooks:
                if _overrides(hook, "forward_weights"):
                    return hook.forward_weights(hook.numbers(moment))
        return None

    def backward_weights(self, batch: int, version: int) -> Tensors | None:
        """The weights for a backward that runs at ``version``; None for those of its rule."""
        behind = version - self._flights[batch].version if self.rewinds else 0
        with torch.no_grad():
            for hook in self._hooks:
                if _overrides(hook, "backward_weights"):
                    return hook.backward_weights(behind)
        return None

    def arrived(self, batch: int) -> None:
        """A micro-batch's gradient is there; the next update applies it."""
        if self.active:
            self._applied.append(self._flights.pop(batch))

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Around the optimizers' steps of the update that ends ``version``."""
        if not self.active:
            yield
            return
        moment = Moment(self.lag_at(version), version)
        if self._watch is not None and self._applied:
            self._watch.late = fmean(version - flight.version for flight in self._applied)
        with self._tuned(moment):
            numbers = [hook.numbers(moment) for hook in self._hooks]
            with torch.no_grad():
                self._judge_predictions()
                read = self._weights_read()
                self._fill_sparse_gradients()
                for hook, of_hook in zip(self._hooks, numbers, strict=True):
                    hook.gradients(of_hook, read)
                for hook, of_hook in zip(self._hooks, numbers, strict=True):
                    hook.before_step(of_hook)
                if self._before is not None:
                    torch._foreach_copy_(self._before, self._parameters)
            yield
            with torch.no_grad():
                for hook, of_hook in zip(self._hooks, numbers, strict=True):
                    hook.after_step(of_hook, self._before)

    def _fill_sparse_gradients(self) -> None:
        """What changes gradients goes element by element."""
        changes = any(
            _overrides(hook, "gradients") for hook in self._hooks if hook is not self._watch
        )
        for parameter in self._parameters if changes else ():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
                for group in self._groups:
                    group.fill_state(parameter)

    def observe(self) -> None:
        """After an update and the learning rate's own step."""
        if not self.active:
            return
        self._applied.clear()
        self._predicted.clear()
        with torch.no_grad():
            for hook in self._hooks:
                hook.observe(self._before)

    @contextmanager
    def _tuned(self, moment: Moment) -> Iterator[None]:
        """Lends the optimizers the rate and momentum that corrections want at this lag."""
        with ExitStack() as stack:
            for group in self._groups:
                rate, momentum = 1.0, group.momentum
                for hook in self._hooks:
                    rate *= hook.rate(moment)
                    momentum = None if momentum is None else hook.momentum(moment, momentum)
                if rate != 1.0 or momentum != group.momentum:
                    stack.enter_context(group.set_to(rate, momentum))
            yield

    def _judge_predictions(self) -> None:
        for flight in self._applied:
            if self._watch is not None and flight.judged is not None:
                self._watch.judge(*flight.judged)

    def _weights_read(self) -> Tensors | None:
        if self._read is None:
            return None
        read = [flight.weights for flight in self._applied if flight.weights is not None]
        return self._read.mean_of(read)

    # ---------------------------------------------------------------- monitors

    def due(self, version: int) -> bool:
        """Whether the monitor is to be read, once at each version."""
        if self._watch is None or version in (0, self._last_read):
            return False
        return version % self._watch.settings.every == 0

    def readings(self, version: int) -> list[tuple[What, float]]:
        """What the monitor reads, if it is due."""
        if self._watch is None or not self.due(version):
            return []
        self._last_read = version
        return list(self._watch.readings())

    def stale_weights(self) -> dict[nn.Parameter, Tensor] | None:
        """What the forward of the next gradient to be applied read; None if that is the newest."""
        waiting = [*self._applied, *(self._flights[batch] for batch in sorted(self._flights))]
        read = waiting[0].weights if waiting else None
        return None if read is None else dict(zip(self._parameters, read, strict=True))

    # ---------------------------------------------------------------- memory

    def forget_flights(self) -> None:
        """Nothing is in flight any more, and the weights may have been written to."""
        self._flights.clear()
        self._applied.clear()
        self._predicted.clear()
        if self._read is not None:
            self._read.forget()

    def forget(self) -> None:
        """Weights were loaded from elsewhere: nothing of the past counts."""
        self.forget_flights()
        self._drop_hooks()

    def _drop_hooks(self) -> None:
        self._hooks, self._watch, self._read, self._before = [], None, None, None
        self._loaded = {}

    def snapshot(self) -> dict[str, Any]:
        """All it remembers, of batches in flight too, as plain values and tensors."""
        return {
            "corrections": self.state_dict(),
            "watch": [] if self._watch is None else [t.clone() for t in _memory_of(self._watch)],
            "read": None if self._read is None else self._read.snapshot(),
            "flights": [[batch, self._words(flight)] for batch, flight in self._flights.items()],
            "applied": [self._words(flight) for flight in self._applied],
            "last_read": self._last_read,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what :meth:`snapshot` took; the fill must have begun already.

        What was taken before a fill has no memory yet, and that of the fill's beginning is fresh.
        """
        if not self.load_state_dict(state["corrections"]):
            warnings.warn(
                f"stage {self._stage}: what its corrections remembered in this checkpoint does not"
                " fit them now (other weights are frozen, or a correction has changed): they begin"
                " anew, and the run will not end with the bits of one that was never disturbed.",
                stacklevel=2,
            )
        if self._watch is not None and state["watch"]:
            for tensor, value in zip(_memory_of(self._watch), state["watch"], strict=True):
                tensor.copy_(value)
        if self._read is not None and state["read"] is not None:
            self._read.restore(state["read"])
        self._flights = {batch: self._flight_of(words) for batch, words in state["flights"]}
        self._applied = [self._flight_of(words) for words in state["applied"]]
        self._last_read = state["last_read"]

    def predicted_in_flight(self) -> Iterator[Tensors]:
        """What forwards were lent, where a correction will ask for it."""
        for flight in (*self._flights.values(), *self._applied):
            kept = flight.weights
            if kept is not None and (self._read is None or self._read.place_of(kept) is None):
                yield kept

    @property
    def bytes(self) -> int:
        """Of what is kept from update to update, but for what was lent to forwards."""
        kept = [*self._memory(), *(self._before or ())]
        if self._read is not None:
            kept += self._read.tensors()
        return sum(tensor.nbytes for tensor in kept)

    def _memory(self) -> list[Tensor]:
        return [tensor for hook in self._hooks for tensor in _memory_of(hook)]

    def _words(self, flight: _Flight) -> list[Any]:
        kept: Any = flight.weights
        place = None if self._read is None or kept is None else self._read.place_of(kept)
        return [flight.version, place, None if kept is None or place is not None else list(kept),
                None if flight.judged is None else list(flight.judged)]  # fmt: skip

    def _flight_of(self, words: list[Any]) -> _Flight:
        version, place, weights, judged = words
        kept = None if weights is None else tuple(weights)
        if place is not None:
            assert self._read is not None
            kept = self._read.at(place)
        return _Flight(version, kept, None if judged is None else (judged[0], judged[1]))

    def state_dict(self) -> dict[str, Any]:
        """What the corrections remember, complete when nothing is in flight."""
        if self._loaded:  # and no fill has begun since
            return dict(self._loaded)
        memory = {name: tensor.detach().clone() for name, tensor in self._named_memory().items()}
        return {"sizes": self._sizes(), "memory": memory} if memory else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Takes back what :meth:`state_dict` gave, at once or when the next fill begins.

        False if it is of no use to these corrections.
        """
        self._loaded = dict(state)
        return self._take_loaded() if self.active and self._loaded else True

    def _take_loaded(self) -> bool:
        loaded, self._loaded = self._loaded, {}
        known, found = self._named_memory(), loaded["memory"]
        # A phase with another lag begins anew, as it would have without a checkpoint.
        if loaded["sizes"] != self._sizes() or shapes_of(found) != shapes_of(known):
            return False
        for name, tensor in known.items():
            tensor.copy_(found[name])
        return True

    def _sizes(self) -> list[int]:
        """Of the fill: memory of another one is of no use."""
        assert self._fill is not None
        return [self._fill.lag, self._fill.micro_batches]

    def _named_memory(self) -> dict[str, Tensor]:
        """Without the monitor's, which another run may do without."""
        acting = [hook for hook in self._hooks if hook is not self._watch]
        return {
            f"{place}.{self._corrections[place].name}.{key}.{number}": tensor
            for place, hook in enumerate(acting)
            for key, tensors in hook.memory().items()
            for number, tensor in enumerate(tensors)
        }


def _overrides(hook: Hook, name: str) -> bool:
    """Whether it has its own say at this point."""
    return getattr(type(hook), name) is not getattr(Hook, name)


def _memory_of(hook: Hook) -> list[Tensor]:
    return [tensor for tensors in hook.memory().values() for tensor in tensors]


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
