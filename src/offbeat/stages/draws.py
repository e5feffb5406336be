"""Whether a forward draws its own random numbers, and nobody else's, beside other threads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from offbeat import nest
from offbeat.errors import StageError
from offbeat.nest import Nest
from offbeat.rng import HostState, host_replayed, keyed, offsets, others, seeded
from offbeat.stages.attributes import Attributes
from offbeat.stages.buffers import WrittenBuffers
from offbeat.stages.flight import Work
from offbeat.stages.habits import Habits


class Draws:
    """Of one stage. It costs nothing while the script has no other threads."""

    def __init__(
        self, index: int, modules: Sequence[nn.Module], device: torch.device, habits: Habits
    ) -> None:
        self._index, self._modules, self._device, self._habits = index, modules, device, habits
        self.forget()

    def forget(self) -> None:
        self._replays: bool | None = None
        self._moved: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """How far forwards have moved generators of the process."""

    def keyed(
        self,
        seed: int,
        work: Work,
        given: Nest,
        forward: Callable[[], None],
        *,
        again: bool,
        lent: bool,
    ) -> AbstractContextManager[None]:
        """Lets a forward draw numbers that depend on its seed alone.

        ``forward`` runs it for nothing; ``again`` and ``lent`` as for :func:`offbeat.rng.keyed`.
        """
        watch = None
        if others():
            lent = lent or self._replayed(seed, forward)
            watch = self._alone(seed, forward, given, work.drawn, lent=lent)
        return keyed(seed, self._device, self._habits, work, again=again, lent=lent, watch=watch)

    def _replayed(self, seed: int, again: Callable[[], None]) -> bool:
        """Whether activation checkpoints draw, which note the process's generator and replay it.

        Asked beside other threads alone: then the forward is run ``again``, for nothing.
        """
        if self._replays is None and others():
            with self._for_nothing(), seeded(seed, self._device, host=True) as apart:
                again()
            self._replays = apart is not None and apart.replays
        return bool(self._replays)

    @contextmanager
    def _for_nothing(self) -> Iterator[None]:
        """Around a forward that leaves no trace."""
        attributes = Attributes(self._modules)
        with WrittenBuffers(self._modules).restored(), torch.no_grad():
            yield
        attributes.put_back()

    @contextmanager
    def _alone(
        self,
        seed: int,
        again: Callable[[], None],
        given: Nest,
        drawn: HostState | None,
        *,
        lent: bool,
    ) -> Iterator[None]:
        """Refuses a forward in which another thread has drawn from generators that are lent to it.

        They have moved otherwise then than after one like it, and than after the same once more:
        how many numbers a forward draws may depend on them. ``drawn``: what it draws once more
        from Python's and NumPy's.
        """
        yield
        host = bool(self._habits.draws or drawn is not None)
        if not (host or lent) or not (names := others()):
            return
        modes = [module.training for module in self._modules]
        like = (*modes, host, lent, *(tensor.shape for tensor in nest.tensors(given)))
        moved = offsets(host=host, lent=lent)
        if self._moved.setdefault(like, moved) == moved:
            return
        random = seeded(seed, self._device, host=host, lent=lent)
        with self._for_nothing(), random, host_replayed(drawn):
            again()
            like_before = offsets(host=host, lent=lent) == moved
        if not like_before:
            raise StageError(
                f"stage {self._index}: its forward moved the process's generators of random numbers"
                f" otherwise than before, and thread {', '.join(map(repr, names))} lives beside it,"
                " which may have drawn from them: then neither has the numbers it should have. Give"
                " that thread generators of its own (torch.Generator, random.Random,"
                " numpy.random.default_rng), or end it before training."
            )
