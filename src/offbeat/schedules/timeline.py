"""How long a schedule takes when every action has a cost: busy share and speed-up, no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean, median_high
from typing import cast

from offbeat.errors import ConfigurationError
from offbeat.methods.base import Method
from offbeat.records.ledger import Ledger
from offbeat.schedules.schedule import Schedule
from offbeat.schedules.table import Action, Kind, Span


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one whole batch costs at one stage, in any unit of time; ``hop`` is one message.

    ``share`` weighs the stages: ``(2, 1)`` makes the first twice as dear as the second, with the
    same total.
    """

    forward: float = 1.0
    recompute: float = 1.0
    backward: float = 2.0
    hop: float = 0.0
    share: Sequence[float] = field(default=())

    def __post_init__(self) -> None:
        for name in ("forward", "recompute", "backward", "hop"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}: a cost is a number of at least 0."
                )
        if not self.forward + self.backward > 0:
            raise ConfigurationError("forward and backward both cost 0: give one of them a cost.")
        if any(not share > 0 for share in self.share):
            raise ConfigurationError(f"share={tuple(self.share)}: give positive numbers.")

    def weights(self, stages: int) -> list[float]:
        """Of all stages; their mean is 1."""
        if not self.share:
            return [1.0] * stages
        if len(self.share) != stages:
            raise ConfigurationError(
                f"share has {len(self.share)} entries for {stages} stages: give one per stage."
            )
        return [share / fmean(self.share) for share in self.share]


@dataclass(frozen=True)
class Timeline:
    """A run of ``steps`` steps in modelled time, and what it comes to once the pipe is full."""

    spans: tuple[Span, ...]
    stages: int
    step_time: float
    """Time per step in the steady state."""
    busy_share: float
    """Part of all stages' time spent on work, recomputation included, in the steady state."""
    speed_up: float
    """Over one device that runs all stages one after the other and recomputes nothing."""

    @property
    def duration(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def middle(self) -> float:
        """When half of the actions have begun: by the clock, a slow start may take most of it."""
        return median_high(span.start for span in self.spans)

    def from_middle(self) -> "Timeline":
        """Without the first half, in which a pipe fills and all is done for the first time."""
        middle = self.middle
        later = [span for span in self.spans if span.start >= middle]
        spans = tuple(Span(s.action, s.start - middle, s.end - middle) for s in later)
        return replace(self, spans=spans)

    def picture(self, width: int = 100, *, shown: float | None = None) -> str:
        """One line per stage; each action starts with its name and lasts as many characters.

        ``shown``: the time that fills the width; by default as much as lets the shortest action
        have its name. Actions too short for their names have the first letter, or are left out.
        """
        margin = len(f"stage {self.stages - 1}") + 2
        columns = max(1, width - margin)
        if shown is None:
            shortest = min((s.end - s.start for s in self.spans if s.end > s.start), default=1.0)
            scale = (1 + max(len(_label(span.action)) for span in self.spans)) / shortest
        else:
            scale = columns / shown
        lines = []
        for stage in range(self.stages):
            line = [" "] * columns
            for span in self.spans:
                # Not round(): halves go to even, and two neighbours would touch.
                first, last = int(span.start * scale + 0.5), int(span.end * scale + 0.5)
                if span.action.stage == stage and first < min(last - 1, columns):
                    fill = "-" if span.action.kind == "F" else "="
                    size = min(last, columns + 1) - first - 1
                    label = _label(span.action)
                    label = label if len(label) <= size else label[0]
                    line[first : first + size] = label.ljust(size, fill)
            text = "".join(line)[:columns].rstrip()
            lines.append(f"stage {stage}".ljust(margin) + text)
        return "\n".join(lines)


def timeline(
    method: Method, stages: int, *, steps: int = 8, costs: Costs | None = None
) -> Timeline:
    """The timing model of a method: its own table, walked with costs.

    >>> from offbeat.methods import GPipe
    >>> round(timeline(GPipe(micro_batches=4), 4).busy_share, 4)  # 4 / (4 + 4 - 1)
    0.5714
    """
    if len(method.phases()) > 1:
        raise ConfigurationError(
            "a timeline shows one method: ask for that of each phase, and join them with"
            " offbeat.app.report.in_turn."
        )
    costs = costs or Costs()
    schedule = method.schedule(stages)
    cost = _cost_of_actions(schedule, method, costs)
    # The steady state is the slope between two runs that are both longer than the fill.
    more = max(4, -(-4 * stages // schedule.micro_batches))
    short = 2 * schedule.fill_steps + more
    ends = [
        max(span.end for span in schedule.table(count).walk(cost, costs.hop))
        for count in (short, short + more)
    ]
    step_time = (ends[1] - ends[0]) / more
    one_device = sum(weight * (costs.forward + costs.backward) for weight in costs.weights(stages))
    steady = schedule.fill_steps
    work = sum(cost(action) for stage in range(stages) for action in schedule.row(stage, steady))
    return Timeline(
        spans=tuple(schedule.table(steps).walk(cost, costs.hop)),
        stages=stages,
        step_time=step_time,
        busy_share=work / (stages * step_time),
        speed_up=one_device / step_time,
    )


def measured_timeline(ledger: Ledger) -> Timeline:
    """A run as it happened, in seconds from its first action; of several replicas the first.

    The speed-up is the work of all stages over the time they took together: what one device would
    have needed, had it been as fast at each of them.
    """
    entries = [e for e in ledger if e.replica == 0 and e.kind in ("F", "B", "U")]
    if not entries:
        raise ConfigurationError("the ledger is empty: there is no run to draw.")
    zero = min(entry.start_s for entry in entries)
    spans = tuple(
        Span(Action(e.stage, cast(Kind, e.kind), e.batch), e.start_s - zero, e.end_s - zero)
        for e in entries
    )
    stages = 1 + max(entry.stage for entry in entries)
    duration = max(span.end for span in spans)
    work = sum(span.end - span.start for span in spans)
    steps = 1 + max((e.batch for e in entries if e.kind == "U"), default=0)
    return Timeline(
        spans=spans,
        stages=stages,
        step_time=duration / steps,
        busy_share=work / (stages * duration),
        speed_up=work / duration,
    )


def _cost_of_actions(schedule: Schedule, method: Method, costs: Costs) -> Callable[[Action], float]:
    """A stage's share of a batch, with recomputation where the rule needs it."""
    scale = [weight / schedule.micro_batches for weight in costs.weights(schedule.stages)]
    # A stage without lag keeps its graph: there is nothing to compute again.
    again = [
        costs.recompute if method.rule == "recompute" and schedule.in_flight(stage) else 0.0
        for stage in range(schedule.stages)
    ]
    of_kind = {
        "F": [costs.forward * share for share in scale],
        "B": [(costs.backward + more) * share for share, more in zip(scale, again, strict=True)],
        "U": [0.0] * schedule.stages,
    }
    return lambda action: of_kind[action.kind][action.stage]


def _label(action: Action) -> str:
    return f"{action.kind}{action.batch}"
