"""Guards: what becomes of a loss or gradient that is not finite, and how old a gradient may be.

A guard sits before the update of one stage. In a stale pipeline that is the only place where
something can still be held back without waiting for anybody: other stages meet the same batch
updates earlier or later, and every one of them decides about its own.

    policy       what happens to an update whose gradient is not finite
    -----------  ------------------------------------------------------------------------------
    warn         it is named in the log, and applied
    stop         the run ends with an error that names it
    skip         it is dropped: weights and optimizer state stay, and the update still counts
    roll-back    it is dropped, and weights and optimizer state return to a copy some updates old

A dropped update counts, so that versions, lags, averages and learning rates stay in step. Without
lag all stages must agree, as plain training would skip the step of the whole model: they exchange
the norms of their gradients, as clipping does.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from offbeat.errors import ConfigurationError, GuardError, unknown
from offbeat.guards.copies import Copy, are_finite, values_of
from offbeat.methods.base import require_count
from offbeat.records.updates import Outcome, Update, Updates
from offbeat.schedules.schedule import Schedule
from offbeat.stages.flight import Flight
from offbeat.stages.norms import Norms
from offbeat.stages.stage import Stage

log = logging.getLogger("offbeat")

Policy = Literal["warn", "stop", "skip", "roll-back"]


@dataclass(frozen=True, kw_only=True)
class Guards:
    """What a trainer watches: ``Trainer(guards=Guards(nonfinite="skip", max_lag=4))``.

    ``nonfinite``  what to do about a gradient whose norm is not finite: "warn", "stop", "skip" or
                   "roll-back".
    ``max_lag``    the most updates a gradient may be behind. A schedule that declares more is
                   refused before the first step, and every update is measured.
    ``every``      with "roll-back": updates between two copies of a stage's weights. It returns to
                   the older of the last two, which at least so many finite updates have followed.
    ``patience``   dropped updates in a row after which a run ends all the same.

    The norm of every update's gradient, its lag and what became of it are in ``trainer.updates``.
    On a GPU reading a norm waits for the update's gradient; without guards nothing does.
    """

    nonfinite: Policy = "stop"
    max_lag: int | None = None
    every: int = 50
    patience: int = 20

    def __post_init__(self) -> None:
        if self.nonfinite not in get_args(Policy):
            raise unknown("policy nonfinite", self.nonfinite, get_args(Policy))
        require_count("every", self.every)
        require_count("patience", self.patience)
        lag = self.max_lag
        if lag is not None and (not isinstance(lag, int) or isinstance(lag, bool) or lag < 0):
            raise ConfigurationError(
                f"max_lag={lag!r}: give a whole number of updates, 0 or more, or None for no bound."
            )

    @property
    def drops(self) -> bool:
        """Whether updates may be held back, about which stages without lag must agree."""
        return self.nonfinite in ("skip", "roll-back")

    def check(self, schedules: Sequence[Schedule], words: object) -> None:
        """Refuses schedules that declare a lag above the bound."""
        for schedule in schedules:
            for stage, lag in enumerate(schedule.lags):
                if self.max_lag is not None and lag > self.max_lag:
                    raise ConfigurationError(
                        f"max_lag={self.max_lag}, and {words} over {schedule.stages} stages has lag"
                        f" {lag} at stage {stage}. Take fewer stages, more micro-batches per update"
                        f" (accumulate=...) or another method, or allow max_lag={lag}."
                    )


class Guard:
    """Watches one stage of one replica; without ``guards`` only at losses that are read anyway."""

    def __init__(self, guards: Guards | None, stage: Stage, updates: Updates) -> None:
        self._guards = guards or Guards(nonfinite="warn")
        self.looks = guards is not None
        """Whether it looks at gradients."""
        self.agrees = self.looks and self._guards.drops
        """Whether it needs the norms of all stages where none lags."""
        self._stage = stage
        self._updates = updates
        self._copies: deque[Copy] = deque(maxlen=2 if self._rolls_back else 1)
        self._part = "batch"
        self._dropped_in_a_row = 0
        self._warned = False

    def forget(self) -> None:
        """Weights were loaded from elsewhere, and nothing is in flight."""
        self._copies.clear()
        self._dropped_in_a_row = 0

    def snapshot(self) -> dict[str, Any]:
        """All it remembers, as plain values and tensors."""
        return {
            "dropped_in_a_row": self._dropped_in_a_row,
            "warned": self._warned,
            "copies": [copy.snapshot() for copy in self._copies],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.forget()
        self._dropped_in_a_row, self._warned = state["dropped_in_a_row"], state["warned"]
        for words in state["copies"]:
            self._keep_copy()
            self._copies[-1].restore(words)

    def _keep_copy(self) -> None:
        before = self._copies[-1] if self._copies else None
        self._copies.append(Copy(self._stage, before, whole=self._rolls_back))

    def begin(self, micro_batches: int) -> None:
        """The next forward is the first of a fill: nothing has touched the weights yet."""
        self._part = "batch" if micro_batches == 1 else "micro-batch"
        if self.agrees and not self._copies:
            self._keep_copy()

    def look_at(self, loss: Tensor, batch: int, version: int) -> None:
        # Without guards nobody waits for a number that is still on a GPU.
        if self.looks or loss.device.type == "cpu":
            number = float(loss)
            if not math.isfinite(number):
                self._meet_loss(batch, version, number)

    def before_update(self, number: int, own: Norms, others: Sequence[Norms]) -> bool:
        """Whether the gradients may be applied; if not, they are gone.

        ``own`` are the norms of the stage's gradients; ``others`` those of all other stages where
        all must agree.
        """
        if not self.looks:
            return True
        stage, flights = self._stage, self._stage.flights
        lag = flights.lag(stage.version)
        self._check_lag(number, flights.landed, lag)
        norm = _together(own)
        finite = math.isfinite(norm) and all(math.isfinite(_together(other)) for other in others)
        outcome: Outcome = "applied"
        if not finite and self._guards.drops:
            outcome = "rolled back" if self._rolls_back else "skipped"
        if not math.isfinite(norm):
            self._meet_gradient(number, flights.landed, lag, outcome)
        self._updates.append(Update(stage.index, number, lag, norm, outcome, replica=stage.replica))
        if outcome == "applied":
            self._dropped_in_a_row = 0
            due = not self._rolls_back or stage.version % self._guards.every == 0
            if self.agrees and due and stage.version > self._copies[-1].version:
                self._keep_copy()
            return True
        self._drop(number)
        return False

    def after_drop(self) -> None:
        """The update has counted, without gradients: puts back what is to be put back."""
        if self._rolls_back and len(self._copies) > 1:  # the newer may be what led here
            self._copies.pop()
        self._copies[-1].put_back()

    @property
    def _rolls_back(self) -> bool:
        return self._guards.nonfinite == "roll-back"

    def _drop(self, number: int) -> None:
        self._stage.drop_gradients()
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self._guards.patience:
            raise GuardError(
                f"stage {self._stage.index}: {self._dropped_in_a_row} updates in a row, up to"
                f" update {number}, were not finite and were dropped"
                f" (patience={self._guards.patience}), so this run learns nothing any more."
                f" {_REMEDY}"
            )

    def _check_lag(self, number: int, landed: Sequence[Flight], lag: int) -> None:
        bound = self._guards.max_lag
        if bound is not None and lag > bound:
            raise GuardError(
                f"stage {self._stage.index}, update {number}: a gradient of {_batches(landed)} is"
                f" {lag} updates behind, and max_lag={bound}. Its schedule declares less: check the"
                " method's cycle with 'offbeat schedule', or raise max_lag."
            )

    def _meet_loss(self, batch: int, version: int, loss: float) -> None:
        stage = self._stage
        words = (
            f"stage {stage.index}{_of_replica(stage)}: the loss of {self._part} {batch} is {loss},"
            f" at version {version} of the weights."
        )
        if self.looks and self._guards.nonfinite == "stop":
            raise GuardError(f"{words} {_REMEDY}")
        if not self._warned and not self._guards.drops:  # those are named at their update
            self._warned = True
            advice = "" if self.looks else " Trainer(guards=offbeat.Guards()) stops at the first."
            log.warning("%s Later ones are not named. %s%s", words, _REMEDY, advice)

    def _meet_gradient(
        self, number: int, landed: Sequence[Flight], lag: int, outcome: Outcome
    ) -> None:
        stage = self._stage
        words = (
            f"stage {stage.index}{_of_replica(stage)}, update {number}: the gradient of"
            f" {_batches(landed)} (lag {lag}) is not finite: {self._culprit()}."
        )
        if self._guards.nonfinite == "stop":
            raise GuardError(f"{words} {_REMEDY}")
        done = {"applied": "Applied all the same.", "skipped": "Skipped."}.get(outcome)
        log.warning("%s %s", words, done or f"Rolled back to version {self._copies[0].version}.")

    def _culprit(self) -> str:
        """The first parameter whose gradient is not finite, and what is in it."""
        met = [p for p in self._stage.parameters if p.grad is not None]
        bad = [p for p in met if not all(are_finite([values_of(p.grad)]))]
        if not bad:
            return "every number is, but their norm is too large for their type"
        values = values_of(bad[0].grad)
        nans, others = int(values.isnan().sum()), int(values.isinf().sum())
        found = [f"{n} {what}" for n, what in ((nans, "nan"), (others, "inf")) if n]
        more = f", and {len(bad) - 1} parameters more" if len(bad) > 1 else ""
        return f"{' and '.join(found)} of {values.numel()} in {self._name(bad[0])}{more}"

    def _name(self, parameter: nn.Parameter) -> str:
        head, name = self._stage.head, repr(self._stage.network.names[id(parameter)])
        of_head = head is not None and any(parameter is own for own in head.parameters())
        return f"{name} of the stage's auxiliary head" if of_head else name


_REMEDY = (
    "Lower the learning rate, bound the gradients (clip=1.0) or the lag (fewer stages,"
    " accumulate=...), and look whether the batch itself is finite;"
    " Guards(nonfinite='skip') drops such updates, 'roll-back' also returns to older weights."
)


def _together(norms: Norms) -> float:
    values = norms.values
    return float(torch.linalg.vector_norm(values)) if values.numel() else 0.0


def _batches(landed: Sequence[Flight]) -> str:
    numbers = [flight.batch for flight in landed]
    if len(numbers) == 1:
        return f"batch {numbers[0]}"
    return f"micro-batches {', '.join(map(str, numbers))}" if numbers else "no batch"


def _of_replica(stage: Stage) -> str:
    return f" of replica {stage.replica}" if stage.replica else ""
