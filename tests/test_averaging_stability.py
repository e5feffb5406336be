"""Thresholds of benchmarks/stability/averages.jsonl, found again and by matrices of the rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.stability.averages import RULES, diverges

ROWS = {
    (row["rule"], row["momentum"], row["state"]): row
    for row in map(
        json.loads,
        (Path(__file__).parent.parent / "benchmarks/stability/averages.jsonl")
        .read_text()
        .splitlines()[1:],
    )
}
Round = Callable[[np.ndarray, float, float], np.ndarray]
"""A round of four updates on a state, with a curvature and a momentum at learning rate 1."""


def local(x: float, v: float, c: float, m: float, steps: int = 4) -> tuple[float, float]:
    for _ in range(steps):
        v = m * v + c * x
        x = x - v
    return x, v


def dasgd(s: np.ndarray, c: float, m: float, *, averaged: bool) -> np.ndarray:
    """The mean under DaSGD(4, 1): merged an update after its start, with a quarter kept."""
    x, v = local(s[0], s[1], c, m, 1)
    x = 0.25 * x + 0.75 * s[0]
    if averaged:
        v = 0.25 * v + 0.75 * s[1]
    return np.array(local(x, v, c, m, 3))


def cocod(s: np.ndarray, c: float, m: float) -> np.ndarray:
    """A replica's distance from the mean under CoCoD(4), which a merge takes a round late."""
    x, v, sent = s
    x, v = local(x, v, c, m)
    return np.array([x - sent, v, x - sent])


def diloco(s: np.ndarray, c: float, m: float) -> np.ndarray:
    """The mean under DiLoCo(4): Nesterov's momentum 0.9 and rate 0.7 outside."""
    v, X, V = s
    x, v = local(X, v, c, m)
    V = 0.9 * V + (X - x)
    return np.array([v, X - 0.7 * ((X - x) + 0.9 * V), V])


CASES: dict[str, tuple[tuple[str, float, str], str, Round, int]] = {
    "dasgd, kept": (
        ("DaSGD(4, 1)", 0.9, "keep"), "mean", lambda *a: dasgd(*a, averaged=False), 2
    ),
    "dasgd, averaged": (
        ("DaSGD(4, 1)", 0.9, "average"), "mean", lambda *a: dasgd(*a, averaged=True), 2
    ),
    "cocod, kept": (("CoCoD(4)", 0.9, "keep"), "disagreement", cocod, 3),
    "diloco, no momentum": (("DiLoCo(4)", 0.0, "keep"), "mean", diloco, 3),
}  # fmt: skip


def radius(step: Round, size: int, c: float, m: float) -> float:
    columns = [step(unit, c, m) for unit in np.eye(size)]
    return float(abs(np.linalg.eigvals(np.stack(columns, 1))).max())


@pytest.mark.parametrize("name", CASES)
def test_a_threshold_is_where_a_round_no_longer_shrinks(name: str) -> None:
    key, mode, step, size = CASES[name]
    stored = ROWS[key][mode]
    assert radius(step, size, 0.997 * stored, key[1]) < 1 + 1e-9
    assert radius(step, size, 1.003 * stored, key[1]) > 1


@pytest.mark.parametrize(
    "name", ["dasgd, kept", pytest.param("cocod, kept", marks=pytest.mark.long)]
)
def test_a_threshold_is_found_again_through_the_library(name: str) -> None:
    (rule, momentum, state), mode, *_ = CASES[name]
    averaging: Any = replace(RULES[rule], optimizer_state=state)  # type: ignore[arg-type]
    stored = ROWS[rule, momentum, state][mode]
    around = torch.tensor([0.98 * stored, 1.02 * stored], dtype=torch.float64)
    assert diverges(averaging, around, momentum, 800)[mode].tolist() == [False, True]
