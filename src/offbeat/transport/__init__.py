"""How messages travel between stages and between replicas. Joining ``LINKS`` is what adds a kind.

The first kind of link that both processes can use is taken, edge by edge.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from offbeat.errors import ConfigurationError, unknown
from offbeat.transport.gloo import Gloo
from offbeat.transport.link import End, Link, Pair, open_pair
from offbeat.transport.shared import SharedMemory

LINKS: tuple[type[Link], ...] = (
    SharedMemory,
    Gloo,
)

Exchange = Callable[[str, Any], list[Any]]
"""Every process of a row gives a value and gets the values of all, in order."""


def choose(seen: Sequence[Sequence[Sequence[str]]], low: int, high: int) -> type[Link]:
    """The kind of link between two places of a row.

    ``seen``: for every place the names of the kinds that reach from it, for each other place.
    """
    both = {*seen[low][high]} & {*seen[high][low]}
    for kind in LINKS:
        if kind.name in both:
            return kind
    raise ConfigurationError(
        f"no link between stages {low} and {high}: of the kinds that may be taken, stage {low} can"
        f" use {_listed(seen[low][high])} and stage {high} {_listed(seen[high][low])}. Allow a kind"
        f" that both can use (known: {_listed([kind.name for kind in LINKS])}), or start the"
        " processes on one host."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def connect(
    place: int,
    exchange: Exchange,
    store: Store,
    device: torch.device,
    timeout_s: float,
    names: Sequence[str] | None = None,
) -> dict[int, Pair]:
    """Opens the links of one process of a row with its neighbours, by their place in the row.

    ``store``: of this row alone. ``names``: the kinds that may be taken, by default all.
    """
    for name in names or ():
        if name not in (known := [kind.name for kind in LINKS]):
            raise unknown("kind of link", name, known)
    kinds = [kind for kind in LINKS if names is None or kind.name in names]
    mine = {kind.name: kind.address() for kind in kinds}
    addresses = exchange("addresses", mine)

    def reaching(theirs: dict[str, Any]) -> list[str]:
        both = [k for k in kinds if mine[k.name] is not None and theirs.get(k.name) is not None]
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
            pairs[other] = open_pair(kind, end, f"stage {other}")
    return pairs


__all__ = ["LINKS", "Link", "Pair", "choose", "connect"]
