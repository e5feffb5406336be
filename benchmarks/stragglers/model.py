"""What a slowed pipeline should take: the method's own table, walked with the very same draws.

An action starts as soon as its stage is free and its message is there (``Table.walk``). Messages
and updates cost nothing, and a stage that is slowed in a step takes ``1 + by`` times as long for
all it does in that step. Two things follow the worker: what is computed again ahead of a backward
does not wait for the gradient, and the time that a slow stage adds to it is spent after the
backward.
"""

from dataclasses import replace

from offbeat.faults import Faults
from offbeat.methods import Method
from offbeat.schedules.table import Action, Table

FORWARD, RECOMPUTE, BACKWARD = 1.0, 1.0, 2.0
_LONG_RUN_STEPS = 3000


def step_time(
    method: Method,
    stages: int,
    faults: Faults | None = None,
    *,
    first: int,
    steps: int,
    barrier: bool = False,
) -> float:
    """Mean time per step over ``steps`` steps from ``first`` on, in units of one forward.

    ``barrier`` keeps the lock of a method that has one (Features Replay); processes have none.
    """
    schedule = method.schedule(stages)
    again = [method.rule == "recompute" and schedule.in_flight(k) > 0 for k in range(stages)]
    table = schedule.table(first + steps, drain=False)
    table = replace(_with_replays(table, again), lockstep=table.lockstep and barrier)
    durations = _durations(table, schedule.micro_batches, again, faults or Faults())
    # A step has ended when stage 0, the last to apply a batch, has done its part of it.
    ends = {s.action: s.end for s in table.walk(durations.__getitem__) if s.action.stage == 0}
    begin, end = (table.rows[0][step - 1][-1] for step in (first, first + steps))
    return (ends[end] - ends[begin]) / steps


def plain_step_time(method: Method, stages: int, *, barrier: bool = False) -> float:
    """The same without faults, where every step is like the other once the pipe is full."""
    fill = 2 * method.schedule(stages).fill_steps + stages
    return step_time(method, stages, first=fill, steps=2 * stages, barrier=barrier)


def increase(
    method: Method, stages: int, faults: Faults, *, first: int, steps: int, barrier: bool = False
) -> float:
    """How much longer a step takes than without faults, in percent."""
    slowed = step_time(method, stages, faults, first=first, steps=steps, barrier=barrier)
    return 100 * (slowed / plain_step_time(method, stages, barrier=barrier) - 1)


def long_run_increase(
    method: Method, stages: int, *, by: float, probability: float, barrier: bool = False
) -> float:
    """What the increase settles at: over a few hundred steps the draws are not yet average."""
    faults = Faults().slow(by=by, probability=probability, seed=1000)
    return increase(method, stages, faults, first=100, steps=_LONG_RUN_STEPS, barrier=barrier)


def _with_replays(table: Table, again: list[bool]) -> Table:
    """The table with what is computed again as an action of its own, ahead of each backward.

    It waits for nobody, as an update does, and is written as one with a number below zero.
    """
    rows = []
    for stage, of_stage in enumerate(table.rows):
        if again[stage]:
            of_stage = tuple(
                tuple(part for action in row for part in _replayed(action)) for row in of_stage
            )
        rows.append(of_stage)
    return replace(table, rows=tuple(rows))


def _replayed(action: Action) -> tuple[Action, ...]:
    replay = Action(action.stage, "U", -1 - action.batch)
    return (replay, action) if action.kind == "B" else (action,)


def _durations(
    table: Table, micro_batches: int, again: list[bool], faults: Faults
) -> dict[Action, float]:
    durations = {}
    for stage, of_stage in enumerate(table.rows):
        for step, row in enumerate(of_stage):
            slow = faults.slowdown(stage, step)
            for action in row:
                if action.kind == "F":
                    cost = FORWARD * (1 + slow)
                elif action.kind == "B":
                    cost = BACKWARD * (1 + slow) + again[stage] * RECOMPUTE * slow
                else:
                    cost = RECOMPUTE if action.batch < 0 else 0.0
                durations[action] = cost / micro_batches
    return durations
