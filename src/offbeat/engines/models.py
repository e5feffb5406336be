"""The user's model and its copies: the model of replica 0, and one for every other replica here."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from offbeat.cutting.cut import Cut
from offbeat.errors import ConfigurationError


class Models:
    """The models that the replicas of this process train; copies follow the flags of the user's."""

    def __init__(self, cut: Cut) -> None:
        self.cuts = [cut]
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._flags: list[tuple[Any, Any, str]] = []
        """Parts of the user's model, their copies, and the flag that copies follow."""

    def begin(self, cut: Cut, replicas: int) -> None:
        """Makes the copies, and settles what is trained."""
        # Replica 0's is the user's own model.
        self.cuts = [cut, *(cut.copy() for _ in range(1, replicas))]
        own, *copies = self
        self._frozen = [(name, p) for name, p in own.named_parameters() if not p.requires_grad]
        for copy in copies:
            self._flags += _pair(own.modules(), copy.modules(), "training")
            self._flags += _pair(own.parameters(), copy.parameters(), "requires_grad")

    def __iter__(self) -> Iterator[nn.Module]:
        return (cut.model for cut in self.cuts)

    def follow(self) -> None:
        """Lets the copies follow the flags the user has set; refuses weights unfrozen since.

        It looks at the whole model, so that all processes refuse alike.
        """
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            raise ConfigurationError(
                f"{thawed[0]} was frozen when this trainer began and has requires_grad now: what is"
                " trained is settled then. Keep the weights with state_dict(), and build a new"
                " Trainer with the model as it is to be trained. The batch was not started."
            )
        for own, copy, name in self._flags:
            setattr(copy, name, getattr(own, name))

    def load(self, state: dict[str, Any]) -> None:
        _check_state(state, self.cuts[0].model)
        for model in self:
            model.load_state_dict(state)


def _check_state(state: dict[str, Any], model: nn.Module) -> None:
    """Refuses, before anything is changed, what ``load_state_dict`` would."""
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"{state!r} is no state: give what state_dict() returned.")
    own = model.state_dict()
    for name in [*own, *state]:
        ours, theirs = own.get(name), state.get(name)
        if not isinstance(ours, Tensor) and name in own and name in state:
            continue  # what a module keeps besides tensors
        if not isinstance(theirs, Tensor) or ours is None or ours.shape != theirs.shape:
            here, there = _describe(own, name), _describe(state, name)
            raise ConfigurationError(
                f"load_state_dict: {name!r} is {there} in the state and {here} in this model. Give"
                " a state of the same model; nothing was loaded."
            )


def _describe(state: Mapping[str, Any], name: str) -> str:
    value = state.get(name)
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    return f"a {type(value).__name__}" if name in state else "missing"


def _pair(own: Iterable[Any], copies: Iterable[Any], flag: str) -> Iterator[tuple[Any, Any, str]]:
    return ((one, other, flag) for one, other in zip(own, copies, strict=True))
