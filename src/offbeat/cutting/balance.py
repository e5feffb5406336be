"""Cutting a row of layers into stages so that the dearest stage is as cheap as it can be."""

from collections.abc import Sequence
from itertools import accumulate


def cut_by_costs(costs: Sequence[float], stages: int) -> list[int]:
    """Where stages 1, 2, ... begin, minimising the largest sum; each stage has at least one layer.

    Exact, by dynamic programming over (stages, layers). Among equal answers the earliest cuts win,
    so that every machine finds the same ones.

    >>> cut_by_costs([4, 1, 1, 1, 1, 4], 3)
    [1, 5]
    """
    layers = len(costs)
    total = [0.0, *accumulate(costs)]
    # best[s][n]: (cost of the dearest stage, start of the last one) for the first n layers in s
    best: list[list[tuple[float, int]]] = [[(total[n], 0) for n in range(layers + 1)]]
    for stage in range(1, stages):
        row = [(float("inf"), 0)] * (layers + 1)
        for n in range(stage + 1, layers + 1):
            row[n] = min(
                (max(best[-1][start][0], total[n] - total[start]), start)
                for start in range(stage, n)
            )
        best.append(row)
    cuts: list[int] = []
    end = layers
    for stage in range(stages - 1, 0, -1):
        end = best[stage][end][1]
        cuts.insert(0, end)
    return cuts
