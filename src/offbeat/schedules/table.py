"""A finite table of actions: what is printed, parsed, checked and run.

One line per stage, steps separated by bars:

    0F0 | 0F1 | 0F2 0B0 0U0 | 0B1 0U1 0B2 0U2
    1F0 1B0 1U0 | 1F1 1B1 1U1 | 1F2 1B2 1U2 |

``2F0`` is stage 2, forward, micro-batch 0; ``2F5@1`` forwards with version 1 of the weights rather
than the newest; ``U`` carries the number of the update.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal, NamedTuple, cast

from offbeat.errors import Deadlock, ScheduleError

Kind = Literal["F", "B", "U"]

_ACTION = re.compile(r"(\d+)([FBU])(\d+)(?:@(\d+))?")


class Action(NamedTuple):
    """Forward, backward or update of one (micro-)batch at one stage."""

    stage: int
    kind: Kind
    batch: int
    version: int | None = None

    def __str__(self) -> str:
        suffix = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.kind}{self.batch}{suffix}"


class Span(NamedTuple):
    """An action and the time it took."""

    action: Action
    start: float
    end: float


def parse_actions(text: str, stage: int | None = None) -> tuple[Action, ...]:
    """Reads ``0F0 0B0 0U0``; with ``stage`` given, refuses actions of another stage."""
    actions = []
    for word in re.finditer(r"\S+", text):
        match = _ACTION.fullmatch(word[0])
        if match is None or (stage is not None and int(match[1]) != stage):
            rule = "not an action" if match is None else f"on the line of stage {stage}"
            raise ScheduleError(
                f"{word[0]!r} is {rule}; an action reads 2F0: stage, F, B or U, batch.\n"
                f"  {text}\n  {' ' * word.start()}^"
            )
        version = None if match[4] is None else int(match[4])
        actions.append(Action(int(match[1]), cast(Kind, match[2]), int(match[3]), version))
    return tuple(actions)


def spell_flags(lockstep: bool, local_losses: bool, *others: str) -> list[str]:
    """The line above a printed table or schedule, if it needs one."""
    flags = ["lockstep"] * lockstep + ["local losses"] * local_losses + [*others]
    return [f"# {', '.join(flags)}"] if flags else []


def split_flags(text: str) -> tuple[str, list[str]]:
    """That line, and those of the stages."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[0], lines[1:]) if lines and lines[0].startswith("#") else ("", lines)


@dataclass(frozen=True)
class Table:
    """``rows[k][n]``: what stage ``k`` does in step ``n``."""

    rows: tuple[tuple[tuple[Action, ...], ...], ...]
    lockstep: bool = False
    local_losses: bool = False

    @property
    def stages(self) -> int:
        return len(self.rows)

    def order(self, stage: int) -> tuple[Action, ...]:
        """Everything a stage does, in its order."""
        return tuple(chain.from_iterable(self.rows[stage]))

    def needs(self, action: Action) -> Action | None:
        """The action of a neighbour whose result this one waits for."""
        if action.kind == "F" and action.stage > 0:
            return Action(action.stage - 1, "F", action.batch)
        if action.kind == "B" and action.stage < self.stages - 1 and not self.local_losses:
            return Action(action.stage + 1, "B", action.batch)
        return None

    def lags(self) -> list[dict[int, int]]:
        """Per stage and micro-batch: updates between its forward and its gradient's application."""
        readings = []
        for stage in range(self.stages):
            read: dict[int, int] = {}
            lag: dict[int, int] = {}
            waiting: list[int] = []
            version = 0
            for action in self.order(stage):
                if action.kind == "F":
                    read[action.batch] = version if action.version is None else action.version
                elif action.kind == "B":
                    waiting.append(action.batch)
                else:
                    lag |= {batch: version - read[batch] for batch in waiting}
                    waiting, version = [], version + 1
            readings.append(lag)
        return readings

    def check(self) -> None:
        """Raises unless the table can be run.

        Each batch comes once, its forward before its backward; a forward reads a version that an
        update before it wrote (0 is there from the start); and nobody waits for ever.
        """
        for stage in range(self.stages):
            self._check_order(stage)
        self.walk()

    def _check_order(self, stage: int) -> None:
        seen: set[tuple[Kind, int]] = set()
        newest = 0
        for place, action in enumerate(self.order(stage)):
            fault = None
            if (action.kind, action.batch) in seen:
                fault = "appears twice"
            elif action.kind == "B" and ("F", action.batch) not in seen:
                fault = f"comes before {stage}F{action.batch}"
            elif action.version is not None and action.version > newest:
                fault = f"reads a version that no update before it wrote (the newest is {newest})"
            newest += action.kind == "U"
            seen.add((action.kind, action.batch))
            if fault:
                raise ScheduleError(
                    f"{action} {fault} at stage {stage}.\n{_point(self.order(stage), place)}"
                )

    def walk(
        self,
        duration: Callable[[Action], float] = lambda action: action.kind != "U",
        hop: float = 0,
    ) -> list[Span]:
        """Starts each action as early as its stage and its input allow.

        ``duration`` defaults to one tick for a forward or backward and none for an update; ``hop``
        is added to every message. Raises :class:`Deadlock` when nobody can go on.
        """
        spans: list[Span] = []
        ends: dict[Action, float] = {}
        clocks = [0.0] * self.stages
        flat = [self.order(stage) for stage in range(self.stages)]
        done = [0] * self.stages
        barrier = _Barrier(self.rows) if self.lockstep else None
        moved = True
        while moved:
            moved = False
            for stage in range(self.stages):
                while done[stage] < len(flat[stage]):
                    action = flat[stage][done[stage]]
                    need = self.needs(action)
                    opens = 0.0 if barrier is None else barrier.opens(stage, done, clocks)
                    if opens is None or (need is not None and need not in ends):
                        break
                    arrival = 0.0 if need is None else ends[need] + hop
                    start = max(clocks[stage], arrival, opens)
                    clocks[stage] = start + duration(action)
                    ends[action._replace(version=None)] = clocks[stage]
                    spans.append(Span(action, start, clocks[stage]))
                    done[stage] += 1
                    moved = True
        self._raise_if_stuck(flat, done)
        return spans

    def _raise_if_stuck(self, flat: Sequence[Sequence[Action]], done: Sequence[int]) -> None:
        lines = []
        for stage, (order, count) in enumerate(zip(flat, done, strict=True)):
            if count < len(order):
                cause = self.needs(order[count]) or "the other stages to end the step"
                lines.append(f"worker {stage} waits at {order[count]} for {cause}")
                lines.append(_point(order, count))
        if lines:
            raise Deadlock("nobody can go on:\n" + "\n".join(lines))

    def grid(self) -> str:
        """Stages down, ticks across: each forward and backward one tick, updates none."""
        cells: dict[tuple[int, int], str] = {}
        for action, start, _ in self.walk():
            if action.kind != "U":
                name = str(action).removeprefix(str(action.stage))
                cells[action.stage, round(start)] = name
        ticks = 1 + max((tick for _, tick in cells), default=0)
        width = 1 + max(2, len(str(ticks)), *map(len, cells.values()))
        head = "tick".ljust(9) + "".join(str(tick).rjust(width) for tick in range(ticks))
        body = [
            f"stage {stage}".ljust(9)
            + "".join(cells.get((stage, tick), ".").rjust(width) for tick in range(ticks))
            for stage in range(self.stages)
        ]
        return "\n".join([head, *body])

    def __str__(self) -> str:
        rows = (" | ".join(" ".join(map(str, row)) for row in of_stage) for of_stage in self.rows)
        flags = spell_flags(self.lockstep, self.local_losses)
        return "\n".join([*flags, *map(str.rstrip, rows)])

    @classmethod
    def parse(cls, text: str) -> "Table":
        """Reads what ``str`` wrote, or what a person wrote; :meth:`check` judges it."""
        flags, lines = split_flags(text)
        rows = tuple(
            tuple(parse_actions(part, stage) for part in line.split("|"))
            for stage, line in enumerate(lines)
        )
        if not rows:
            raise ScheduleError("an empty table: write one line of actions per stage, as 0F0 0B0.")
        return cls(rows, lockstep="lockstep" in flags, local_losses="local losses" in flags)


class _Barrier:
    """Lockstep: no stage begins a step before every stage has ended the one before."""

    def __init__(self, rows: Sequence[Sequence[Sequence[Action]]]) -> None:
        self._starts = [[0, *accumulate(len(row) for row in of_stage)] for of_stage in rows]
        self._opened: dict[int, float] = {}

    def opens(self, stage: int, done: Sequence[int], clocks: Sequence[float]) -> float | None:
        """When the step of the stage's next action opened, or None while it is closed."""
        step = bisect_right(self._starts[stage], done[stage]) - 1
        if any(count < starts[step] for count, starts in zip(done, self._starts, strict=True)):
            return None
        return self._opened.setdefault(step, max(clocks))


def _point(actions: Iterable[Action], place: int, around: int = 6) -> str:
    """The neighbourhood of one action with an arrow under it."""
    words = list(map(str, actions))
    first = max(0, place - around)
    shown = words[first : place + around + 1]
    lead = "... " if first else ""
    before = len(lead) + sum(len(word) + 1 for word in shown[: place - first])
    return f"  {lead}{' '.join(shown)}\n  {' ' * before}^"
