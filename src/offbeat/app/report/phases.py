"""The timeline of methods that run one after the other."""

from collections.abc import Sequence

from offbeat.errors import ConfigurationError
from offbeat.schedules.table import Span
from offbeat.schedules.timeline import Timeline


def in_turn(parts: Sequence[tuple[Timeline, int]]) -> Timeline:
    """One timeline from (timeline of a phase, updates it runs for).

    Drawn end to end, each phase after the drain of the one before. The rates are those of the whole
    run: with a share x of the updates pipelined at speed-up s, and the rest plain, the speed-up is
    ``1 / (x/s + 1 - x)`` (Zhang, Abdelrahman 2019). Drains, once per phase, are left out of them.

    >>> from offbeat.methods import StaleWeights, Synchronous
    >>> from offbeat.schedules.timeline import timeline
    >>> halves = [(timeline(StaleWeights(), 4), 500), (timeline(Synchronous(), 4), 500)]
    >>> in_turn(halves).speed_up
    1.6
    """
    updates = sum(count for _, count in parts)
    if updates < 1 or len({part.stages for part, _ in parts}) != 1:
        raise ConfigurationError(
            "in_turn() needs phases with the same number of stages and at least one update; got"
            f" {[(part.stages, count) for part, count in parts]} as (stages, updates)."
        )
    time = sum(part.step_time * count for part, count in parts)
    work = sum(part.busy_share * part.step_time * count for part, count in parts)
    one_device = sum(part.speed_up * part.step_time * count for part, count in parts)
    return Timeline(
        spans=_end_to_end([part for part, _ in parts]),
        stages=parts[0][0].stages,
        step_time=time / updates,
        busy_share=work / time,
        speed_up=one_device / time,
    )


def _end_to_end(parts: Sequence[Timeline]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for part in parts:
        start = max((span.end for span in spans), default=0.0)
        # Updates are numbered by step, forwards and backwards by micro-batch.
        counted = {"F": 0, "B": 0, "U": 0}
        for span in spans:
            counted[span.action.kind] = max(counted[span.action.kind], span.action.batch + 1)
        spans += [
            Span(
                span.action._replace(batch=span.action.batch + counted[span.action.kind]),
                span.start + start,
                span.end + start,
            )
            for span in part.spans
        ]
    return tuple(spans)
