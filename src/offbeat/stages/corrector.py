"""All corrections of one stage, called by it at three points: forward, backward, update."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from offbeat.corrections.base import Correction, Hook, Moment, Surroundings
from offbeat.corrections.groups import Group, Tensors, groups_of
from offbeat.corrections.read_weights import ReadWeights
from offbeat.corrections.sample import Sample
from offbeat.errors import ConfigurationError
from offbeat.monitors import WATCHES, Monitor, Watch
from offbeat.records.readings import What
from offbeat.stages.fill import Fill
from offbeat.stages.flight import Flight, Flights
from offbeat.stages.state import CorrectorState


class Corrector:
    """Lets the corrections act on every micro-batch by its lag; inactive without lag.

    Order within an update: gradients are changed, the optimizer steps with the rate and momentum by
    lag, the step is changed, everything is observed. Corrections of one kind act in the order in
    which they were given.
    """

    def __init__(
        self,
        corrections: Sequence[Correction],
        monitor: Monitor | None,
        flights: Flights,
        stage: int,
        stages: int,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._corrections, self._monitor, self._flights = corrections, monitor, flights
        self._stage, self._stages, self._parameters = stage, stages, tuple(parameters)
        self._last_read: int | None = None
        """The version at which the monitor was last read."""
        self._fill: Fill | None = None
        self.generation = 0
        """How often hooks have been made: each time with new memory."""
        self._drop_hooks()
        self._predicted: dict[tuple[int, int], Tensors | None] = {}
        """Forward weights by version read and lag: the micro-batches of one step share them."""

    def begin(self, fill: Fill, optimizers: Sequence[Optimizer]) -> None:
        """Makes ready for a fill; hooks live on from the last one if nothing else has changed."""
        before, self._fill = self._fill, fill
        self._forget_weights()
        idle = not self._corrections and self._monitor is None
        if fill.lag == 0 or not self._parameters or idle:
            self._drop_hooks()
            return
        sizes = (fill.lag, fill.micro_batches)
        if not self.hooks or before is None or sizes != (before.lag, before.micro_batches):
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
                    if overrides(hook, point):
                        other = lenders.setdefault(point, correction.name)
                        if other != correction.name:
                            raise ConfigurationError(
                                f"{other} and {correction.name} both choose the"
                                f" {point.replace('_', ' ')}, and a stage can have those of one"
                                " only: leave the other out."
                            )
                if sparse and overrides(hook, "gradients"):
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

    def _drop_hooks(self) -> None:
        self.hooks: list[Hook] = []
        self.active = False
        """Whether there is anything to correct or to watch in this fill; if not, nobody asks."""
        self._groups: list[Group] = []
        self._watches: list[Watch] = []
        self._sample: Sample | None = None
        """Of the weights, for the monitors; None where nobody watches."""
        self._predictor: Hook | None = None
        """The one correction that chooses the weights of forwards."""
        self._rewinder: Hook | None = None
        """The same of backwards."""
        self._read: ReadWeights | None = None
        self._before: Tensors | None = None
        self._loaded: dict[str, Any] = {}
        """What was loaded, until the next fill begins."""

    def _make_hooks(self, fill: Fill, optimizers: Sequence[Optimizer]) -> None:
        self._groups = groups_of(optimizers)
        self.generation += 1
        around = self._surroundings(fill.lag, self._groups)
        self._sample, self._watches = None, []
        if self._monitor is not None:
            self._sample = Sample(self._parameters)
            self._watches = [watch(around, self._sample) for watch in WATCHES]
        hooks = [correction.hook(around) for correction in self._corrections]
        self.hooks = [*self._watches, *hooks]  # watches see gradients as they arrive
        self.active = bool(self.hooks)
        self._predictor = next((h for h in self.hooks if overrides(h, "forward_weights")), None)
        self._rewinder = next((h for h in self.hooks if overrides(h, "backward_weights")), None)
        self._read = self._before = None
        probes = self._monitor is not None and self._monitor.probe
        if probes or any(hook.needs_read for hook in self.hooks):
            self._read = ReadWeights(self._parameters, fill.lag, fill.micro_batches)
        if any(hook.needs_before for hook in self.hooks):
            self._before = tuple(torch.zeros_like(p) for p in self._parameters)

    @property
    def predicts(self) -> bool:
        """Whether forwards use other weights than the newest."""
        return self._predictor is not None

    @property
    def rewinds(self) -> bool:
        """Whether backwards use other weights than those of their rule."""
        return self._rewinder is not None

    @property
    def acts_forward(self) -> bool:
        """Whether a forward has more to do than the network's own work."""
        return self.predicts or (self.active and self._read is not None)

    @property
    def repeats(self) -> bool:
        """Whether updates of one lag are the same work each time."""
        if not self.active:
            return True
        watched = self._read is not None or self._watches
        return not watched and all(hook.repeats for hook in self.hooks)

    @property
    def shrinkage(self) -> float:
        """Factor on the gradients that arrive."""
        lags = self._fill is not None and self._fill.lag > 0
        return math.prod(c.shrinkage for c in self._corrections) if lags else 1.0

    # ---------------------------------------------------------------- the three points

    def forward_weights(
        self, flight: Flight, newest: int, values: Sequence[Tensor] | None
    ) -> Sequence[Tensor] | None:
        """The weights to go forward with; ``values``, None for the stage's own, if unchanged.

        ``newest`` is the version of the stage's own. Notes on the flight what is asked for later.
        """
        predicted = None if self._predictor is None else self._prediction(flight, newest)
        used = values if predicted is None else predicted
        if self._read is not None:
            flight.read = predicted
            if predicted is None:
                flight.read = self._read.keep(flight.version, values)
        if self._sample is not None and predicted is not None:
            own = self._parameters if values is None else tuple(values)
            flight.judged = (self._sample.of(predicted), self._sample.of(own))
        return used

    def _prediction(self, flight: Flight, newest: int) -> Tensors | None:
        assert self._fill is not None
        step = (flight.batch - self._fill.first_batch) // self._fill.micro_batches
        lag = self._fill.first_update + step - flight.version
        asked = (flight.version, lag)
        if asked not in self._predicted:
            self._predicted[asked] = self.predict(Moment(lag, newest))
        return self._predicted[asked]

    def predict(self, moment: Moment) -> Tensors | None:
        """What a forward of this moment is lent; None for the weights in use."""
        assert self._predictor is not None
        with torch.no_grad(), self._tuned(moment):
            return self._predictor.forward_weights(self._predictor.numbers(moment))

    def backward_weights(self, behind: int) -> Tensors | None:
        """The weights for a backward ``behind`` updates after its forward; None for its rule's."""
        if self._rewinder is None:
            return None
        with torch.no_grad():
            return self._rewinder.backward_weights(behind)

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Around the optimizers' steps of the update that ends ``version``."""
        moment = Moment(self._flights.lag(version), version)
        for watch in self._watches if self._flights.landed else ():
            watch.late = self._flights.mean_lag(version)
        with self._tuned(moment):
            numbers = [hook.numbers(moment) for hook in self.hooks]
            with torch.no_grad():
                self._judge_predictions()
                read = self._weights_read()
                self._fill_sparse_gradients()
                for hook, of_hook in zip(self.hooks, numbers, strict=True):
                    hook.gradients(of_hook, read)
                for hook, of_hook in zip(self.hooks, numbers, strict=True):
                    hook.before_step(of_hook)
                if self._before is not None:
                    torch._foreach_copy_(self._before, self._parameters)
            yield
            with torch.no_grad():
                for hook, of_hook in zip(self.hooks, numbers, strict=True):
                    hook.after_step(of_hook, self._before)

    def _fill_sparse_gradients(self) -> None:
        """What changes gradients goes element by element."""
        changes = any(overrides(hook, "gradients") for hook in self._acting)
        for parameter in self._parameters if changes else ():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
                for group in self._groups:
                    group.fill_state(parameter)

    def observe(self) -> None:
        """After an update and the learning rate's own step."""
        self._predicted.clear()
        with torch.no_grad():
            for hook in self.hooks:
                hook.observe(self._before)

    @contextmanager
    def _tuned(self, moment: Moment) -> Iterator[None]:
        """Lends the optimizers the rate and momentum that corrections want at this lag."""
        with ExitStack() as stack:
            for group in self._groups:
                rate, momentum = 1.0, group.momentum
                for hook in self.hooks:
                    rate *= hook.rate(moment)
                    momentum = None if momentum is None else hook.momentum(moment, momentum)
                if rate != 1.0 or momentum != group.momentum:
                    stack.enter_context(group.set_to(rate, momentum))
            yield

    def _judge_predictions(self) -> None:
        for flight in self._flights.landed:
            if flight.judged is not None:
                for watch in self._watches:
                    watch.judge(*flight.judged)

    def _weights_read(self) -> Tensors | None:
        if self._read is None:
            return None
        return self._read.mean_of([f.read for f in self._flights.landed if f.read is not None])

    # ---------------------------------------------------------------- monitors

    def due(self, version: int) -> bool:
        """Whether the monitors are to be read, once at each version."""
        if self._monitor is None or not self._watches or version in (0, self._last_read):
            return False
        return version % self._monitor.every == 0

    def readings(self, version: int) -> list[tuple[What, float]]:
        """What the monitors read now."""
        self._last_read = version
        return [reading for watch in self._watches for reading in watch.readings()]

    def stale_weights(self) -> dict[nn.Parameter, Tensor] | None:
        """What the forward of the next gradient to be applied read; None if that is the newest."""
        oldest = self._flights.oldest
        if oldest is None or oldest.read is None:
            return None
        return dict(zip(self._parameters, oldest.read, strict=True))

    # ---------------------------------------------------------------- memory

    def _forget_weights(self) -> None:
        """Weights may have been written to."""
        self._predicted.clear()
        if self._read is not None:
            self._read.forget()

    def forget(self) -> None:
        """Weights were loaded from elsewhere: nothing of the past counts."""
        self._forget_weights()
        self._drop_hooks()

    def snapshot(self) -> CorrectorState:
        """All it remembers but for what flights hold, as plain values and tensors."""
        return {
            "corrections": self.state_dict(),
            "watch": [tensor.clone() for tensor in tensors_of(self._watches)],
            "read": None if self._read is None else self._read.snapshot(),
            "last_read": self._last_read,
        }

    def restore(self, state: CorrectorState) -> None:
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
        watched = tensors_of(self._watches)
        if len(state["watch"]) == len(watched):  # or of other monitors
            for tensor, value in zip(watched, state["watch"], strict=True):
                tensor.copy_(value)
        if self._read is not None and state["read"] is not None:
            self._read.restore(state["read"])
        self._last_read = state["last_read"]

    def words_of(self, read: Tensors | None) -> int | list[Tensor] | None:
        """What a flight has read, to be stored: its place in the memory here, or itself."""
        place = None if self._read is None or read is None else self._read.place_of(read)
        return list(read) if place is None and read is not None else place

    def read_of(self, words: int | Sequence[Tensor] | None) -> Tensors | None:
        """What :meth:`words_of` stood for."""
        if isinstance(words, int):
            assert self._read is not None
            return self._read.at(words)
        return None if words is None else tuple(words)

    def predicted_in_flight(self) -> Iterator[Tensors]:
        """What forwards were lent, where a correction will ask for it."""
        for flight in (*self._flights.in_air.values(), *self._flights.landed):
            read = flight.read
            if read is not None and (self._read is None or self._read.place_of(read) is None):
                yield read

    @property
    def bytes(self) -> int:
        """Of what is kept from update to update, but for what was lent to forwards."""
        kept = [*self.tensors(), *(self._before or ())]
        if self._read is not None:
            kept += self._read.tensors()
        return sum(tensor.nbytes for tensor in kept)

    def tensors(self) -> list[Tensor]:
        """What the hooks remember between updates."""
        return tensors_of(self.hooks)

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

    @property
    def _acting(self) -> list[Hook]:
        """The corrections' own, one for each."""
        return self.hooks[len(self._watches) :]

    def _sizes(self) -> list[int]:
        """Of the fill: memory of another one is of no use."""
        assert self._fill is not None
        return [self._fill.lag, self._fill.micro_batches]

    def _named_memory(self) -> dict[str, Tensor]:
        """Without the monitor's, which another run may do without."""
        return {
            f"{place}.{self._corrections[place].name}.{key}.{number}": tensor
            for place, hook in enumerate(self._acting)
            for key, tensors in hook.memory().items()
            for number, tensor in enumerate(tensors)
        }


def overrides(hook: Hook, name: str) -> bool:
    """Whether it has its own say at this point."""
    return getattr(type(hook), name) is not getattr(Hook, name)


def tensors_of(hooks: Sequence[Hook]) -> list[Tensor]:
    """What hooks remember."""
    return [t for hook in hooks for tensors in hook.memory().values() for t in tensors]


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
