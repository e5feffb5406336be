"""This process among replicas of which any may die and come back: who is in, and who joins."""

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.elastic.door import RESTARTS, Admission, Door, knock, return_number, returns_of
from offbeat.elastic.survivors import Survivors
from offbeat.errors import WorkerLost
from offbeat.transport import Pair, groups
from offbeat.transport.mailbox import Mailbox


class Membership:
    """One stage of one replica; it and the others are named by their lives (see ``door``)."""

    def __init__(
        self,
        rank: int,
        stages: int,
        replicas: int,
        mailbox: Mailbox,
        *,
        device: torch.device,
        timeout_s: float,
        declare_dead: Callable[[int], None],
        is_dead: Callable[[int], bool],
    ) -> None:
        self._rank, self._stages, self._replicas = rank, stages, replicas
        self._mailbox, self._device, self._timeout_s = mailbox, device, timeout_s
        self._declare_dead, self._is_dead = declare_dead, is_dead
        self.door: Door | None = None
        """Lets in who comes back, if the launcher starts processes again."""

    def begin(
        self, pairs: dict[int, Pair], life: int, members: Sequence[int] | None = None
    ) -> Survivors:
        """From now on averages are taken among those who are left."""
        mailbox = self._mailbox
        survivors = mailbox.peers = Survivors(
            self._rank % self._stages,
            life,
            range(self._rank % self._stages, self._replicas * self._stages, self._stages),
            pairs,
            device=self._device,
            deliver=mailbox.put,
            declare_dead=self._declare_dead,
            members=members,
        )
        if RESTARTS in os.environ:
            returns_of(groups.root_store()).set("stages", str(self._stages))
            there = range(self._replicas) if members is None else [*members, life]
            self.door = Door(
                groups.root_store(),
                self._rank,
                self._stages,
                self._replicas,
                lost=survivors.has_lost,
                dead=self._is_dead,
                closed=lambda: survivors.closing,
                failure=lambda: mailbox.failure,
                lives={one % self._replicas: one for one in there},
                after=return_number(),
                timeout_s=self._timeout_s,
            )
            survivors.helpers.append(self.door)
            self.door.start()
        return survivors

    def admission(self, step: int) -> tuple[Admission, Pair] | None:
        """Whom to let in before this step, if anybody."""
        return None if self.door is None else self.door.admission(step)

    def admit(self, admission: Admission, pair: Pair, gift: Tensor) -> None:
        assert isinstance(self._mailbox.peers, Survivors)
        self._mailbox.peers.admit(admission, pair, gift)

    def join(self) -> tuple[Admission, list[Tensor]]:
        """Of a replica that has come back: waits to be let in, and for what the others give."""
        number, store = return_number(), returns_of(groups.root_store())
        failure = lambda: self._mailbox.failure  # noqa: E731
        admission, pairs = knock(
            store, number, self._rank, self._stages, self._replicas, failure, self._timeout_s
        )
        survivors = self.begin(pairs, admission.life, admission.members)
        gifts = self._await_gifts(survivors, admission.step)
        survivors.joined = True
        survivors.say_who_is_back(admission)
        store.set(f"{number}/joined/{self._rank % self._stages}", "yes")
        return admission, gifts

    def _await_gifts(self, survivors: Survivors, step: int) -> list[Tensor]:
        deadline = time.monotonic() + self._timeout_s
        while (gifts := survivors.gifts()) is None:
            if self._mailbox.failure is not None:
                raise self._mailbox.failure
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"the other replicas did not come to step {step}, at which this one joins,"
                    f" within {self._timeout_s:g} s (timeout={self._timeout_s:g})."
                )
            time.sleep(0.01)
        if not gifts:
            raise WorkerLost("the run ended before this replica could join.")
        return gifts
