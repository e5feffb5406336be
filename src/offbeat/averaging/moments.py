"""Averages of momentum and Adam's moments: whatever an optimizer keeps in the shape of a weight.

Replicas need not have the same ones: the update of one may have been dropped, or a weight may have
had a gradient in another replica only. Yet what they send must have the same places, or it could
not be gathered. So a vector has a place for everything an optimizer keeps once it has stepped a
weight, zeros where there is nothing yet, and says which places count.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.averaging.flat import flatten, ordered_mean
from offbeat.errors import ConfigurationError
from offbeat.rng import seeded


class MomentPlace(NamedTuple):
    """One place in a vector, by numbers, so that a checkpoint can name it."""

    parameter: int
    optimizer: int
    name: str


_Kept = dict[str, torch.dtype]
"""What an optimizer keeps in the shape of a weight, by name."""


class Moments:
    """What the optimizers of some parameters keep."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer], stage: int
    ) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._stage = stage
        self._asked: dict[Any, _Kept] = {}
        """What stand-ins have told, by kind of weight."""

    def parts(self) -> tuple[list[MomentPlace], list[Tensor]]:
        """The places, and on the wire: one vector, and for each place whether it counts."""
        places: list[MomentPlace] = []
        values: list[Tensor] = []
        there: list[float] = []
        for place, optimizer in enumerate(self._optimizers):
            groups = {id(p): n for n, g in enumerate(optimizer.param_groups) for p in g["params"]}
            for number, parameter in enumerate(self._parameters):
                if id(parameter) not in groups:
                    continue
                found = _shaped_like(parameter, optimizer.state.get(parameter, {}))
                counts = bool(found)
                if not found:
                    to_come = self._to_come(place, groups[id(parameter)], parameter)
                    found = {n: torch.zeros_like(parameter, dtype=d) for n, d in to_come.items()}
                places += [MomentPlace(number, place, name) for name in found]
                values += found.values()
                there += [float(counts)] * len(found)
        if not places:
            return [], []
        vector = flatten(values)
        return places, [vector, vector.new_tensor(there)]

    def _to_come(self, place: int, number: int, parameter: nn.Parameter) -> _Kept:
        """What an optimizer will keep of a weight of this group that it has not stepped yet."""
        optimizer = self._optimizers[place]
        group = optimizer.param_groups[number]
        for other in group["params"]:
            state = optimizer.state.get(other, {})
            if state and _alike(other, state, parameter):
                return _dtypes(other, state)
        kind = (place, number, parameter.shape, parameter.dtype)
        if kind not in self._asked:
            self._asked[kind] = self._ask(optimizer, group, parameter)
        return self._asked[kind]

    def _ask(self, optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> _Kept:
        """Lets the optimizer step a stand-in, and looks at what it keeps."""
        dense = torch.zeros_like(parameter).detach()
        for gradient in (dense, dense.to_sparse(1) if dense.dim() else dense):
            stand_in = nn.Parameter(dense.clone())
            stand_in.grad = gradient
            try:
                with seeded(0, parameter.device):
                    state = _after_a_step(optimizer, group, stand_in)
            except Exception as error:
                refused = error  # SparseAdam wants no dense gradient, others no sparse one
            else:
                return _dtypes(stand_in, state)
        raise ConfigurationError(
            f"optimizer_state='average': a weight of stage {self._stage} has not been stepped yet,"
            f" and what {type(optimizer).__name__} keeps of one could not be found out with a"
            f" stand-in ({type(refused).__name__}: {refused}). Use optimizer_state='keep' or"
            " 'reset', or an optimizer that steps any parameter of its groups."
        )

    @torch.no_grad()
    def merge(
        self, places: Sequence[MomentPlace], parts: Sequence[Sequence[Tensor]], keep: float
    ) -> None:
        """Moves what is kept now towards the mean of what was sent, if anything was.

        By the convex rule alone: Adam's second moment must not become negative.
        """
        # Sums, whether they were made on the way or not; each is divided by its own count.
        total, counts = (ordered_mean([own[part] for own in parts], 1) for part in (0, 1))
        sizes = [self._parameters[place.parameter].numel() for place in places]
        for place, summed, count in zip(places, total.split(sizes), counts.tolist(), strict=True):
            parameter = self._parameters[place.parameter]
            state = self._optimizers[place.optimizer].state.get(parameter, {})
            now = _shaped_like(parameter, state).get(place.name)
            if now is not None and count:
                mean = summed.view(now.shape) / count
                merged = mean + keep * (now.to_dense().to(mean.dtype) - mean)
                if now.is_sparse:
                    state[place.name] = merged.to(now.dtype)
                else:
                    now.copy_(merged)


def _shaped_like(parameter: nn.Parameter, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in sorted(state.items())
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape == parameter.shape
        and value.dim() > 0
    }


def _dtypes(parameter: nn.Parameter, state: Mapping[Any, Any]) -> _Kept:
    return {name: value.dtype for name, value in _shaped_like(parameter, state).items()}


def _alike(stepped: nn.Parameter, state: Mapping[Any, Any], other: nn.Parameter) -> bool:
    """Whether what is kept of one weight says what will be kept of another.

    It does where an optimizer keeps single numbers and tensors of the weight's shape, as Adam does.
    Adafactor keeps rows and columns, and those of a square or a thin weight may have its shape.
    """
    if stepped.dtype != other.dtype or stepped.dim() != other.dim():
        return False
    kept = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    return stepped.shape == other.shape or (
        len({1, *stepped.shape}) == 1 + stepped.dim()
        and all(value.shape == stepped.shape for value in kept)
    )


def _after_a_step(
    optimizer: Optimizer, group: dict[str, Any], stand_in: nn.Parameter
) -> Mapping[Any, Any]:
    """What an optimizer like this one keeps of a parameter that it has stepped once."""
    like = object.__new__(type(optimizer))
    vars(like).update(vars(optimizer))
    vars(like).pop("step", None)  # a scheduler's, which would step the optimizer itself
    like.param_groups = [{**group, "params": [stand_in]}]
    like.state = defaultdict(dict)
    like._optimizer_step_pre_hooks = OrderedDict()
    like._optimizer_step_post_hooks = OrderedDict()
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's wrapper calls the hooks of all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(like)
    found: Mapping[Any, Any] = like.state[stand_in]
    return found
