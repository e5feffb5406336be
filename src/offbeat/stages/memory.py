"""What a stage holds, measured on the storages that are really alive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from offbeat.stages.versions import Graph, SavedActivation


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a stage holds right now, between two steps."""

    weight_copies: int
    """Versions of the weights in memory, the newest included."""
    peak_weight_copies: int
    """The most versions held at once so far, within a step too."""
    graphs: int
    """Micro-batches whose graph waits for its backward."""
    inputs: int
    """Micro-batches of which only the stage's input is kept (rule ``recompute``)."""
    peak_in_flight: int
    """The most micro-batches held at once so far, graphs or inputs."""
    weight_bytes: int
    """All versions together."""
    in_flight_bytes: int
    """Activations in graphs, or stored inputs; what has come of weights that several stages use."""
    correction_bytes: int = 0
    """What corrections and monitors keep: earlier steps, weights that forwards have read."""
    parameters: int = 0
    """Numbers in its weights, of one version."""
    layers: int = 0
    """Modules with weights of their own."""
    averaging_bytes: int = 0
    """What averages keep: global copies, what an outer optimizer remembers, averages under way."""
    average_sends_bytes: int = 0
    """What a replica sends to another one in a round, once all its averages have been started."""


class Storages:
    """Storages counted once each, however many tensors look at them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._weights = {id(p): {_place(p)} for p in parameters}
        self._others: set[tuple[int, int]] = set()

    def add_version(self, parameter: nn.Parameter, values: Tensor) -> None:
        self._weights[id(parameter)].add(_place(values))

    def add_graph(self, graph: Graph) -> None:
        for saved in graph.held():
            if isinstance(saved, SavedActivation):
                self._others.add(_place(saved.tensor))
            elif saved is not None:
                self.add_version(saved.parameter, saved.source)

    def add_tensors(self, tensors: Iterable[Tensor]) -> None:
        self._others |= {_place(tensor) for tensor in tensors}

    @property
    def weight_copies(self) -> int:
        return max((len(places) for places in self._weights.values()), default=0)

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in set().union(*self._weights.values()))

    @property
    def other_bytes(self) -> int:
        return sum(size for _, size in self._others)


def _place(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
