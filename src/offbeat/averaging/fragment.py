"""A part of a stage's weights that is averaged as one flat vector, and what it has under way."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from offbeat.averaging.base import Averaging, Plan
from offbeat.averaging.compression import codec_for
from offbeat.averaging.flat import flatten, ordered_mean, write
from offbeat.averaging.moments import MomentPlace, Moments
from offbeat.stages.stage import Stage
from offbeat.transport.base import Gathered


class Departure(NamedTuple):
    """What is kept of an average until it arrives."""

    round: int
    known: Tensor | None
    """The point it is measured from, where it is sent as the way from one."""
    weights: Tensor | None
    """This replica's own weights then, where the merge needs them."""
    moments: list[MomentPlace]
    """What was sent of the optimizers, which may keep more when it is merged."""


class Fragment:
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        stage: Stage,
        averaging: Averaging,
        plan: Plan,
        replicas: int,
    ) -> None:
        weights = flatten(parameters)
        self.parameters = parameters
        self._stage = stage
        self._plan = plan
        self._replicas = replicas
        self._policy = averaging.state_at_merge
        self._progress = plan.kept_progress
        self.outer = plan.outer(weights, replicas)
        self.outer.learn_shapes(tuple(tuple(p.shape) for p in parameters))
        self.sent_bytes = 0
        """Of the newest average."""
        self.under_way: dict[int, Departure] = {}
        """By the version of the weights at which an average was started."""
        self._rounds = 0
        """Averages started so far."""
        self._now: Tensor | None = None
        """Memory for the weights at a merge."""
        sizes = [parameter.numel() for parameter in parameters]
        self._codec = codec_for(averaging.compress, weights.dtype, sizes)
        # Few bits go far when they describe the way from a point that every replica knows: the
        # last average of all. A late one is measured from the point known when it was started.
        relative = averaging.compress is not None and self.outer.sends == "weights"
        self._known: Tensor | None = weights if relative else None
        self._moments = Moments(parameters, stage.optimizers, stage.index)

    @property
    def started(self) -> int | None:
        """When the oldest average under way was started."""
        return next(iter(self.under_way), None)

    def members(self) -> list[set[int]] | None:
        """Per replica whose parts it needs of the average that starts next; None: all of all's.

        All, too, where parts are measured from the last average of all.
        """
        if self._plan.partners is None or self._known is not None:
            return None
        everyone = range(self._replicas)
        return [self._plan.members(self._rounds, replica, self._replicas) for replica in everyone]

    def start(self, version: int) -> list[Tensor]:
        """What this replica contributes to an average that starts now."""
        now = flatten(self.parameters)
        part = self.outer.part(now)
        if self._known is not None:
            part = part - self._known
        parts = self._codec.encode(part)
        moments: list[MomentPlace] = []
        if self._policy == "average":
            moments, sent = self._moments.parts()
            parts += sent
        own = now if self._plan.keep != self._progress else None
        self.under_way[version] = Departure(self._rounds, self._known, own, moments)
        self._rounds += 1
        self.sent_bytes = sum(part.numel() * part.itemsize for part in parts)
        return parts

    def merge(self, version: int, gathered: Gathered | None) -> None:
        """Moves this replica's weights to, or towards, what the outer rule makes of the average."""
        mean, left = None, None
        if gathered is not None:
            left = self.under_way.pop(version)
            of_all, gathered = gathered, self._of_partners(left.round, gathered)
            mean = self._mean_of(gathered)
            if left.known is not None:
                mean = self._known = left.known + mean
                if gathered is not of_all:  # what partners agree on the others do not know
                    self._known = left.known + self._mean_of(of_all)
        self._now = now = flatten(self.parameters, self._now)
        target = self.outer.target(mean, now)
        if target is None:
            return
        write(self._merged(target, now, None if left is None else left.weights), self.parameters)
        if left is not None and gathered is not None and left.moments:
            sent = [of_one[self._codec.width :] for of_one in gathered.parts]
            self._moments.merge(left.moments, sent, self._plan.keep)
        elif self._policy == "reset":
            for optimizer in self._stage.optimizers:
                for parameter in self.parameters:
                    optimizer.state.pop(parameter, None)

    def _of_partners(self, round: int, gathered: Gathered) -> Gathered:
        if self._plan.partners is None:
            return gathered
        members = self._plan.members(round, self._stage.replica, self._replicas)
        senders = range(self._replicas) if gathered.senders is None else gathered.senders
        pairs = zip(senders, gathered.parts, strict=True)
        parts = [of_one for sender, of_one in pairs if sender in members]
        return gathered._replace(parts=parts, replicas=len(parts))

    def _mean_of(self, gathered: Gathered) -> Tensor:
        width = self._codec.width
        vectors = [self._codec.decode(of_one[:width]) for of_one in gathered.parts]
        return ordered_mean(vectors, gathered.replicas)

    def _merged(self, target: Tensor, now: Tensor, sent: Tensor | None) -> Tensor:
        """X + keep (x_sent - X) + progress (x - x_sent), written over ``now``.

        Never over x_sent, which other replicas of this process may not have read yet.
        """
        keep = self._plan.keep
        if keep == self._progress == 0:
            return target
        if sent is None:
            return now.sub_(target).mul_(keep).add_(target)
        now.sub_(sent).mul_(self._progress)
        return now.add_((sent - target).mul_(keep).add_(target))

    def settle(self) -> None:
        """All replicas have just been given the same weights."""
        weights = flatten(self.parameters)
        self.outer.settle(weights)
        self.under_way.clear()
        if self._known is not None:
            self._known = weights

    def snapshot(self, *, debts: bool) -> dict[str, Any]:
        return {
            "outer": self.outer.memory(),
            "codec": self._codec.memory() if debts else {},
            "rounds": self._rounds,
            "known": self._known,
            "under_way": {
                version: [*left[:3], [tuple(place) for place in left.moments]]
                for version, left in self.under_way.items()
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.outer.load(state["outer"])
        self._codec.load(state["codec"])
        self._rounds, self._known = state["rounds"], state["known"]
        self.under_way = {
            version: Departure(round, known, weights, [MomentPlace(*place) for place in places])
            for version, (round, known, weights, places) in state["under_way"].items()
        }
