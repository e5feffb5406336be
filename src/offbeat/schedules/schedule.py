"""The order of work at every stage, as a value: the one thing that decides the weights.

A stage repeats a *cycle* of actions, one repetition per step. In step ``n`` every batch number of
the cycle is shifted by ``n``; numbers below zero are left out, which is the *fill*, and after the
last step so are the forwards, which is the *drain*. StaleWeights over three stages:

    stage 0: fill 0F0 0F1 0F2 0F3 | cycle 0F4 0B0 0U0 | drain 0B1 0U1 0B2 0U2 0B3 0U3 0B4 0U4
    stage 1: fill 1F0 1F1 | cycle 1F2 1B0 1U0 | drain 1B1 1U1 1B2 1U2
    stage 2: fill - | cycle 2F0 2B0 2U0 | drain -

Batches are micro-batches here: one step feeds ``micro_batches`` of them, and ``U`` is numbered by
the step whose gradients it applies.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from offbeat.errors import ScheduleError
from offbeat.schedules.table import Action, Kind, Table, parse_actions, spell_flags, split_flags


class Slot(NamedTuple):
    """One action of a cycle, relative to its step.

    ``offset`` counts micro-batches from the first of the step (for ``U``: steps). ``version``,
    counted in updates from the step's number, is set only where a forward reads weights older than
    the newest.
    """

    kind: Kind
    offset: int
    version: int | None = None


Cycle = tuple[Slot, ...]


@dataclass(frozen=True)
class Schedule:
    """One cycle per stage; fill, drain, rows, lags and text are read off it."""

    cycles: tuple[Cycle, ...]
    micro_batches: int = 1
    hops: tuple[int, ...] = ()
    """Ticks from a stage to the next (the papers' p_k); empty means none were declared."""
    lockstep: bool = False
    """Whether the method keeps a barrier after every step (the forward lock of DDG and FR)."""
    local_losses: bool = False
    """Whether every stage has a loss of its own, so that no gradient travels (DGL)."""

    def __post_init__(self) -> None:
        for stage, cycle in enumerate(self.cycles):
            for kind, count in (("F", self.micro_batches), ("B", self.micro_batches), ("U", 1)):
                present = sum(slot.kind == kind for slot in cycle)
                if present != count:
                    raise ScheduleError(
                        f"stage {stage}: a cycle has {present} {kind} actions; one step of"
                        f" {self.micro_batches} micro-batches needs {count}. Got:"
                        f" {' '.join(map(str, self.row(stage, self._full_step(stage))))}"
                    )

    @property
    def stages(self) -> int:
        return len(self.cycles)

    def _full_step(self, stage: int) -> int:
        """The first step in which nothing is left out: how many steps the fill takes."""
        return max(_steps_behind(slot, self.micro_batches) for slot in self.cycles[stage])

    def row(self, stage: int, step: int) -> tuple[Action, ...]:
        """What a stage does in one step."""
        return tuple(
            action
            for slot in self.cycles[stage]
            if (action := _shift(slot, stage, step, self.micro_batches)).batch >= 0
        )

    def drain(self, stage: int, steps: int) -> tuple[Action, ...]:
        """What a stage still has to do after ``steps`` steps, so that all of it is applied."""
        ends = {"F": 0, "B": steps * self.micro_batches, "U": steps}
        return tuple(
            action
            for step in range(steps, steps + self._full_step(stage))
            for action in self.row(stage, step)
            if action.batch < ends[action.kind]
        )

    def table(self, steps: int, *, drain: bool = True) -> Table:
        """The first ``steps`` steps of all stages, with the drain as a last row."""
        rows = []
        for stage in range(self.stages):
            of_stage = [self.row(stage, step) for step in range(steps)]
            rows.append((*of_stage, self.drain(stage, steps)) if drain else tuple(of_stage))
        return Table(tuple(rows), lockstep=self.lockstep, local_losses=self.local_losses)

    @cached_property
    def fill_steps(self) -> int:
        """Steps until every stage runs whole cycles."""
        return max(self._full_step(stage) for stage in range(self.stages))

    def depth(self, stage: int) -> int:
        """How many batches a stage has been fed and not yet applied once the pipe is full.

        After step n it has applied batches 0..n - depth. That is not its lag where forwards read
        an older version than the newest.
        """
        (update,) = (slot for slot in self.cycles[stage] if slot.kind == "U")
        return -update.offset

    @cached_property
    def loss_delay(self) -> int:
        """Steps from feeding a batch to its gradient being applied at stage 0."""
        return self.depth(0)

    @cached_property
    def lags(self) -> tuple[int, ...]:
        """Per stage, the most updates between a forward and the application of its gradient."""
        readings = self.table(2 * self.fill_steps + 2).lags()
        return tuple(max(of_stage.values()) for of_stage in readings)

    def in_flight(self, stage: int) -> int:
        """How many micro-batches the stage holds between two steps once the pipe is full."""
        offsets = {kind: [s.offset for s in self.cycles[stage] if s.kind == kind] for kind in "FB"}
        return max(offsets["F"]) - max(offsets["B"])

    def kept_versions(self, stage: int) -> int:
        """How many versions before the newest a forward may ask for."""
        return max(-slot.version if slot.version else 0 for slot in self.cycles[stage])

    @property
    def synchronous(self) -> bool:
        """Whether this is plain training: no lag anywhere and one loss for all stages."""
        return not self.local_losses and not any(self.lags)

    def __str__(self) -> str:
        hops = [f"hops {' '.join(map(str, self.hops))}"] if self.hops else []
        lines = spell_flags(self.lockstep, self.local_losses, *hops)
        for stage in range(self.stages):
            full = self._full_step(stage)
            fill = [action for step in range(full) for action in self.row(stage, step)]
            parts = (fill, self.row(stage, full), self.drain(stage, full + 1))
            words = [" ".join(map(str, part)) or "-" for part in parts]
            lines.append(f"stage {stage}: fill {words[0]} | cycle {words[1]} | drain {words[2]}")
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads what ``str`` wrote, and refuses a fill or drain that is not the cycle's."""
        flags, lines = split_flags(text)
        if not lines:
            raise ScheduleError(f"{text!r} has no stage. A stage reads: {_EXAMPLE}")
        cycles = []
        micro_batches = 1
        for stage, line in enumerate(lines):
            actions = parse_actions(_part(line, "cycle"), stage)
            micro_batches = sum(action.kind == "F" for action in actions)
            if not micro_batches:
                raise ScheduleError(f"{line!r}: a cycle needs a forward. A stage reads: {_EXAMPLE}")
            cycles.append(_cycle_of(actions, micro_batches))
        hops = re.search(r"hops ([\d ]+)", flags)
        schedule = cls(
            cycles=tuple(cycles),
            micro_batches=micro_batches,
            hops=tuple(map(int, hops[1].split())) if hops else (),
            lockstep="lockstep" in flags,
            local_losses="local losses" in flags,
        )
        _compare(schedule, lines)
        return schedule


def stagger(depths: Sequence[int], micro_batches: int = 1) -> tuple[Cycle, ...]:
    """The cycles of an asynchronous pipeline that keeps ``depths[k]`` micro-batches in flight.

    Stage ``k`` forwards micro-batch ``i``, then backwards ``i - depths[k]``; the update follows the
    last backward of a step's micro-batches.
    """
    cycles = []
    for depth in depths:
        cycle: list[Slot] = []
        for j in range(micro_batches):
            cycle += [Slot("F", j), Slot("B", j - depth)]
            step, place = divmod(j - depth, micro_batches)
            if place == micro_batches - 1:
                cycle.append(Slot("U", step))
        cycles.append(tuple(cycle))
    return tuple(cycles)


def _shift(slot: Slot, stage: int, step: int, micro_batches: int) -> Action:
    if slot.kind == "U":
        return Action(stage, "U", step + slot.offset)
    version = None if slot.version is None else max(0, step + slot.version)
    return Action(stage, slot.kind, step * micro_batches + slot.offset, version)


def _steps_behind(slot: Slot, micro_batches: int) -> int:
    behind = -slot.offset if slot.kind == "U" else -(slot.offset // micro_batches)
    return max(behind, -(slot.version or 0))


def _cycle_of(actions: Sequence[Action], micro_batches: int) -> Cycle:
    """A cycle from its spelled-out first whole repetition."""
    step = min(action.batch for action in actions if action.kind == "F") // micro_batches
    return tuple(
        Slot(
            kind,
            number - (step if kind == "U" else step * micro_batches),
            None if version is None else version - step,
        )
        for _, kind, number, version in actions
    )


_EXAMPLE = "'stage 0: fill 0F0 | cycle 0F1 0B0 0U0 | drain 0B1 0U1', with '-' for nothing."


def _part(line: str, name: str) -> str:
    part = re.search(rf"\b{name}\b([^|]*)", line)
    if part is None:
        raise ScheduleError(f"{line!r} has no {name!r} part. A stage reads: {_EXAMPLE}")
    return part[1].strip().strip("-")


def _compare(schedule: Schedule, lines: Sequence[str]) -> None:
    _, ours = split_flags(str(schedule))
    for stage, line in enumerate(lines):
        for name in ("fill", "drain"):
            written, expected = _part(line, name), _part(ours[stage], name)
            if parse_actions(written, stage) != parse_actions(expected, stage):
                raise ScheduleError(
                    f"stage {stage}: the {name} does not belong to the cycle.\n"
                    f"  written:  {written or '-'}\n"
                    f"  expected: {expected or '-'}"
                )
