"""How tensors travel between workers: keys and nests, nothing else."""

from typing import Any, Literal, NamedTuple, Protocol

What = Literal["activation", "gradient", "target", "norms", "loss", "evaluation", "result", "batch"]


class Key(NamedTuple):
    """Names one message: what it is, which stage it is for and of which (micro-)batch."""

    what: What
    to: int
    batch: int
    source: int = 0
    """The sender, where several stages send the same thing."""

    def __str__(self) -> str:
        return f"the {self.what} of batch {self.batch} for stage {self.to}"


class Transport(Protocol):
    """Messages are sent once and received once; sending never waits."""

    def send(self, key: Key, message: Any) -> None: ...

    def arrived(self, key: Key) -> bool:
        """Whether :meth:`receive` would return at once."""

    def receive(self, key: Key) -> Any:
        """Takes the message out, waiting for it if need be."""

    def clear(self) -> None:
        """Forgets messages that nobody will take."""
