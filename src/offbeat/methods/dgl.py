"""DGL: every stage learns from a loss of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ConfigurationError
from offbeat.methods.base import Asynchronous


@dataclass(frozen=True)
class DGL(Asynchronous):
    """Decoupled greedy learning: an auxiliary head per stage, only activations move.

    Update: ``W_k[n+1] = Opt(W_k[n], gradient of loss(head_k(h_k(n)), y))`` on a detached input.
    Lag: 0, but not back-propagation. Memory: one set of weights, one graph, and the heads, which
    are trained with their stage and stay out of ``state_dict``.
    Reference: Belilovsky et al., "Decoupled Greedy Learning of CNNs", 2020 (arXiv 1901.08164).

    ``head(activation, output)`` builds the head of one stage from its first activation and the
    network's first output, both detached; the paper's head is the default.

    >>> DGL().schedule(3).local_losses
    True
    """

    name = "dgl"
    title = "DGL"
    lag_formula = "0"
    copies = "1"
    waits_for = "nothing"
    reference = "Belilovsky et al. 2020, arXiv 1901.08164"
    local_losses = True
    in_flight_per_hop = 0

    head: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and not callable(self.head):
            raise ConfigurationError(
                f"DGL(head={self.head!r}): give a function head(activation, output) that returns an"
                " nn.Module, or None for the paper's."
            )

    @property
    def head_factory(self) -> Callable[[Any, Any], Any] | None:
        return self.head
