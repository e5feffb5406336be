"""Which way messages take, edge by edge. Joining ``LINKS`` is what adds a kind between processes.

Within a process a message is a reference. Between two processes the first kind of link is taken
that both can use.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.errors import ConfigurationError
from offbeat.stages.lanes import Addresses
from offbeat.transport.base import Transport
from offbeat.transport.gloo import Gloo
from offbeat.transport.lanes import LaneMemory
from offbeat.transport.link import End, Link, Pair, open_pair
from offbeat.transport.memory import Meeting
from offbeat.transport.shared import SharedMemory

LINKS: tuple[type[Link], ...] = (
    SharedMemory,
    Gloo,
)
"""In order of preference. The last reaches any process, and what has been sent by it arrives even
if its sender dies: it joins replicas that go on without each other.
"""

Exchange = Callable[[str, Any], list[Any]]
"""Every process of a row gives a value and gets the values of all, in order."""


def within(replicas: int, lanes: Addresses | None = None) -> dict[int, Transport]:
    """The transports of a process that has all stages, by replica; between lanes of one GPU."""
    if lanes is not None:
        return {0: LaneMemory(lanes)}
    return dict(enumerate(Meeting(replicas).rows))


def choose(seen: Sequence[Sequence[Sequence[str]]], low: int, high: int) -> type[Link]:
    """The kind of link between two processes of a row.

    ``seen``: for every one the names of the kinds that reach from it, for each other one.
    """
    both = {*seen[low][high]} & {*seen[high][low]}
    for kind in LINKS:
        if kind.name in both:
            return kind
    raise ConfigurationError(
        f"no link between processes {low} and {high} of a replica: of the kinds that there are"
        f" ({_listed([kind.name for kind in LINKS])}), process {low} can use"
        f" {_listed(seen[low][high])} and process {high} {_listed(seen[high][low])}. Start"
        " them on one host."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def connect(
    place: int, exchange: Exchange, store: Store, device: torch.device, timeout_s: float
) -> dict[int, Pair]:
    """Opens the links of one process of a row with its neighbours, by their place in the row.

    ``store``: of this row alone.
    """
    mine = {kind.name: kind.address() for kind in LINKS}
    addresses = exchange("addresses", mine)

    def reaching(theirs: dict[str, Any]) -> list[str]:
        both = [k for k in LINKS if mine[k.name] is not None and theirs.get(k.name) is not None]
        return [kind.name for kind in both if kind.reaches(mine[kind.name], theirs[kind.name])]

    seen = exchange("reaching", [reaching(theirs) for theirs in addresses])
    # For every edge of the row, so that all its processes hear of one that cannot be.
    chosen = [choose(seen, low, high) for low, high in pairwise(range(len(addresses)))]
    pairs = {}
    # From the first edge to the last: nobody waits here for one who waits further down.
    for low, kind in enumerate(chosen):
        if place in (low, low + 1):
            other = low + 1 if place == low else low
            edge, theirs = PrefixStore(str(low), store), addresses[other][kind.name]
            end = End(place == low, edge, theirs, device, timeout_s)
            pairs[other] = open_pair(kind, end, f"process {other} of this replica")
    return pairs


def connect_ring(
    place: int, ranks: Sequence[int], store: Store, timeout_s: float
) -> dict[int, Pair]:
    """Links with the processes before and after this one in a ring, by rank.

    They carry nothing: they break at once when the process behind them dies.
    """
    size, pairs = len(ranks), {}
    # From the first edge to the last: nobody waits here for one who waits further on.
    for low in range(size if size > 2 else size - 1):
        edge = (low, (low + 1) % size)
        if place in edge:
            other = ranks[edge[1] if place == low else low]
            own = PrefixStore(f"ring-{low}", store)
            pairs[other] = connect_two(own, timeout_s, f"rank {other}", first=place == low)
    return pairs


def connect_two(store: Store, timeout_s: float, whom: str, *, first: bool) -> Pair:
    """Opens links that need nobody but the two, one of whom is ``first``; ``store``: of the two."""
    kind = LINKS[-1]
    return open_pair(kind, End(first, store, kind.address(), kind.device, timeout_s), whom)


__all__ = ["LINKS", "Link", "Pair", "choose", "connect", "connect_ring", "connect_two", "within"]
