"""The ways to cut a model. Joining ``WAYS`` is what adds one: see docs/add-a-cut.md."""

from collections.abc import Sequence
from dataclasses import replace

from offbeat.cutting.absent import take_from_meta
from offbeat.cutting.blocks import BlocksCut
from offbeat.cutting.cut import Cut, Cuts, Model, Wish
from offbeat.cutting.given import GivenCut
from offbeat.cutting.sequential import SequentialCut
from offbeat.cutting.traced import TracedCut

WAYS: tuple[type[Cut], ...] = (GivenCut, SequentialCut, BlocksCut, TracedCut)
"""The first that is for a model cuts it; the last is for every model."""


def plan_cut(
    model: Model,
    *,
    stages: int | None = None,
    cuts: Cuts | None = None,
    ppv: Sequence[int] | None = None,
) -> Cut:
    """Decides, as far as possible without data, where the stages begin."""
    wish = Wish(model, stages, cuts, ppv)
    for way in WAYS:
        cut = way.plan(wish)
        if cut is not None:
            cut = replace(cut, absent=take_from_meta(cut.model))
            return cut if cut.needs_batch else cut.with_ties()
    raise TypeError(f"no way to cut a {type(model).__name__}")
