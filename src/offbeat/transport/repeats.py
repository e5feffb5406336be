"""Weights that travel with every micro-batch, and are sent once per version.

A connection keeps messages in order, so its two ends know alike which values went over it last. A
tie whose values the other end has from the message before is left out, and put back there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from offbeat.errors import WorkerLost
from offbeat.nest import Bundle
from offbeat.transport.base import Key

Ties = dict[str, Any]
Place = tuple[str, int, str]
"""What for, to which stage, and which weight: of each the last values are known."""


class Repeats:
    """One end of a connection. One tensor, as an object, stands for one version of a weight."""

    def __init__(self) -> None:
        self._sent: dict[Place, Tensor] = {}
        self._received: dict[Place, Tensor] = {}

    def leave_out(self, key: Key, message: Any) -> Any:
        """The message without the ties that the other end has."""
        if key.what == "evaluation" and key.batch == 0:  # weights may have been written by hand
            self.forget_sent()

        def changed(ties: Ties) -> Ties:
            places = {name: (key.what, key.to, name) for name in ties}
            left = {n: None if self._sent.get(places[n]) is tie else tie for n, tie in ties.items()}
            self._sent |= {places[name]: tie for name, tie in ties.items()}
            return left

        return _with_ties(message, changed)

    def put_back(self, key: Key, message: Any) -> Any:
        """The message as it was before any tie was left out."""

        def whole(ties: Ties) -> Ties:
            for name, tie in ties.items():
                if tie is not None:
                    self._received[key.what, key.to, name] = tie
            try:
                return {name: self._received[key.what, key.to, name] for name in ties}
            except KeyError as error:
                raise WorkerLost(
                    f"a message names values of the weight {error} that never arrived: the"
                    " processes run different versions of offbeat."
                ) from None

        return _with_ties(message, whole)

    def forget_sent(self) -> None:
        """Sends everything anew."""
        self._sent = {}


def _with_ties(message: Any, change: Callable[[Ties], Ties]) -> Any:
    if isinstance(message, Bundle):
        return Bundle(message.given, change(message.ties))
    if type(message) in (tuple, list):
        return type(message)(_with_ties(part, change) for part in message)
    return message
