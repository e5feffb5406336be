"""The serial engine: all stages of all replicas in this process, one action at a time."""

from collections.abc import Callable, Sequence

from offbeat.engines.base import Engine, refuse_stuck
from offbeat.engines.placement import Placement
from offbeat.engines.worker import Worker
from offbeat.transport import within

Choose = Callable[[Sequence[Worker]], Worker]


class Serial(Engine):
    """Runs whichever worker can go on; the order between them changes no bit."""

    runs_in_turn = True

    def __init__(self, stages: int, replicas: int) -> None:
        super().__init__(Placement.across(stages, replicas, 1, 0))
        self.transports = within(replicas)
        self.choose: Choose = choose_updates_last

    def run(self) -> None:
        waiting = list(self.workers)
        ready: list[Worker] = []
        while True:
            # Whoever could go on still can: messages do not go away.
            ready += (awake := [worker for worker in waiting if worker.ready()])
            waiting = [worker for worker in waiting if worker not in awake]
            if not ready:
                return refuse_stuck(waiting)
            worker = self.choose(ready)
            worker.advance()
            ready.remove(worker)
            waiting.append(worker)


def choose_updates_last(ready: Sequence[Worker]) -> Worker:
    """Forwards, then backwards, then updates: an error leaves as few weights moved as can be.

    Deep stages go first: what the last ones have just computed is still in the cache.
    """
    return min(ready, key=lambda w: ("FBUSM".index(w.pending[0].kind), -w.stage.index))
