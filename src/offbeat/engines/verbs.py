"""What processes have been asked to do together, so that one that is asked for else is told so."""

import json
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

ENDED = ""
"""In place of the name of a verb: the script, or what it did with this trainer, is over."""
_KEPT = 32


class Verbs:
    """Those of one process, by number; the store has the latest of all."""

    def __init__(self, rank: int, life: str) -> None:
        """``life``: what tells a process that has come back from the one before."""
        self._rank, self._life = rank, life
        self._names: dict[int, str] = {}
        self._count = 0
        self._told: tuple[int, str] = (0, "")

    def enter(self, name: str) -> None:
        self._names[self._count + 1] = name
        self._count += 1
        self._names.pop(self._count - _KEPT, None)

    def take_back(self) -> None:
        """The last one was refused, and nobody waits for this process there."""
        self._count -= 1

    def end(self, store: Store) -> None:
        self.enter(ENDED)
        self._tell(store)

    def compare(self, store: Store, company: Sequence[int]) -> str | None:
        """Whether one of the ``company`` does something else meanwhile, in words."""
        number, own = self._latest
        if (number, own) != self._told:
            self._told = number, own
            self._tell(store)
            return None
        for rank in company if number else ():
            key = f"verbs/{rank}{self._life}"
            theirs = json.loads(store.get(key)) if store.check([key]) else {}
            other = theirs.get(str(number), own)
            if other != own:
                found = sorted([(self._rank, own), (rank, other)])
                first, second = (f"rank {who} {_in_words(verb)}" for who, verb in found)
                return (
                    f"{first}, and {second}: all processes must call the same, in the same order."
                    " Under 'if trainer.rank == 0' belongs only what is done with the result:"
                    " state = trainer.state_dict() in all processes, then 'if trainer.rank == 0:"
                    " torch.save(state, ...)'."
                )
        return None

    @property
    def _latest(self) -> tuple[int, str]:
        count = self._count
        return count, self._names.get(count, "")

    def _tell(self, store: Store) -> None:
        count, names = self._count, self._names.copy()
        recent = {number: name for number, name in names.items() if number <= count}
        store.set(f"verbs/{self._rank}{self._life}", json.dumps(recent))


def _in_words(verb: str) -> str:
    return f"is in {verb}" if verb else "has ended"
