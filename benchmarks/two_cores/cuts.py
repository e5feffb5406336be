"""Where to cut: the best balance for two stages, the shortest step for four chunks.

Four chunks per model belong to the interleaved schedules. Their best cut depends on the order in
which a schedule visits the chunks, so each schedule's own order, as torch emits it, is played
through with the measured costs for every possible cut.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any

from benchmarks.two_cores.variants import MICRO_BATCHES, SCHEDULES, chunks_of, cut_name

Order = list[list[tuple[int, str, int]]]
"""Per rank: chunk, action, micro-batch."""


@dataclass(frozen=True)
class Costs:
    """Seconds of every child of a model, per number of micro-batches a batch is split into."""

    forward: dict[int, list[float]]
    backward: dict[int, list[float]]
    update: list[float]

    @classmethod
    def read(cls, measured: dict[str, Any]) -> "Costs":
        def by_parts(table: dict[str, list[float]]) -> dict[int, list[float]]:
            return {int(parts): row for parts, row in table.items()}

        return cls(
            by_parts(measured["forward_s"]),
            by_parts(measured["backward_s"]),
            measured["update_s"],
        )


def best_two(costs: Costs, forwards: int = 1) -> list[int]:
    """Cuts into two, best balance first; a stage 0 that recomputes counts two ``forwards``."""
    forward, backward, update = costs.forward[1], costs.backward[1], costs.update
    whole = [sum(row) for row in zip(forward, backward, update, strict=True)]

    def slowest(cut: int) -> float:
        return max(sum(whole[:cut]) + (forwards - 1) * sum(forward[:cut]), sum(whole[cut:]))

    return sorted(range(1, len(whole)), key=slowest)


def choose(measured: dict[str, Any]) -> dict[str, list[int]]:
    """Every cut that a contestant asks for, by name."""
    costs = Costs.read(measured)
    pairs = measured["stage_pairs_s"]
    cuts = {
        "two": [int(min(pairs, key=lambda cut: max(pairs[cut])))],
        "recompute": best_two(costs, forwards=2)[:1],
    }
    for name in SCHEDULES:
        if chunks_of(name) == 4:
            for parts in MICRO_BATCHES:
                cuts[cut_name(name, parts)] = best_four(costs, name, parts)
    return cuts


def best_four(costs: Costs, schedule: str, parts: int) -> list[int]:
    order = order_of(SCHEDULES[schedule][0], parts)
    cuts = combinations(range(1, len(costs.update)), 3)
    return list(min(cuts, key=lambda cut: step_seconds(costs, order, parts, tuple(cut))))


@lru_cache
def order_of(schedule: str, parts: int) -> Order:
    """The order in which torch's schedule visits the chunks."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    actions: Any = get_schedule_ops(schedule, 2, parts, 2)
    return [
        [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in rank
            if action is not None and action.computation_type.value in "FBIW"
        ]
        for rank in actions
    ]


def step_seconds(costs: Costs, order: Order, parts: int, cut: tuple[int, ...]) -> float:
    """How long a step takes when messages cost nothing."""
    spans = list(pairwise([0, *cut, len(costs.update)]))
    forward = [sum(costs.forward[parts][a:b]) for a, b in spans]
    backward = [sum(costs.backward[parts][a:b]) for a, b in spans]
    half = [seconds / 2 for seconds in backward]  # by input, by weight: about alike
    seconds = {"F": forward, "B": backward, "I": half, "W": half}
    clocks = [0.0 for _ in order]
    places = [0 for _ in order]
    ended: dict[tuple[int, str, int], float] = {}
    while any(place < len(row) for place, row in zip(places, order, strict=True)):
        moved = False
        for rank, row in enumerate(order):
            while places[rank] < len(row):
                chunk, kind, part = row[places[rank]]
                start = _ready(ended, chunk, kind, part, last=len(spans) - 1)
                if start is None:
                    break
                clocks[rank] = max(clocks[rank], start) + seconds[kind][chunk]
                ended[chunk, "B" if kind == "I" else kind, part] = clocks[rank]
                places[rank] += 1
                moved = True
        assert moved, f"{order} cannot go on at {places}"
    owned = [{chunk for chunk, _, _ in row} for row in order]
    updates = [sum(sum(costs.update[slice(*spans[chunk])]) for chunk in own) for own in owned]
    return max(clock + update for clock, update in zip(clocks, updates, strict=True))


def _ready(
    ended: dict[tuple[int, str, int], float], chunk: int, kind: str, part: int, *, last: int
) -> float | None:
    """When what an action needs is there; None while something it needs has not run."""
    if kind == "W" or (kind == "F" and chunk == 0):
        return 0.0
    if kind == "F":
        return ended.get((chunk - 1, "F", part))
    return ended.get((chunk, "F", part) if chunk == last else (chunk + 1, "B", part))
