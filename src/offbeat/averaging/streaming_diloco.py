"""Streaming DiLoCo: the model is averaged in fragments, each late and mixed in."""

from dataclasses import dataclass
from functools import partial

from offbeat.averaging.base import Plan, require_delay, require_share
from offbeat.averaging.diloco import OuterSettings, Step
from offbeat.errors import ConfigurationError
from offbeat.methods.base import require_count


@dataclass(frozen=True)
class StreamingDiLoCo(OuterSettings):
    """Each of ``fragments`` has its own round of ``every`` updates, shifted against the others'.

    A fragment's average change is started, arrives ``delay`` updates later, makes an outer step
    from the fragment's last global copy, and is merged: ``x <- mix x + (1 - mix) X``. Layer i of a
    stage (a module with weights of its own) belongs to fragment i mod ``fragments``; fragment p
    starts after updates ``(p+1) every / fragments`` of a round. Reference: Douillard et al.,
    "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512).
    """

    name = "streaming-diloco"
    title = "Streaming DiLoCo"
    reference = "Douillard et al. 2025, arXiv 2501.18512"

    fragments: int = 2
    delay: int = 1
    mix: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("fragments", self.fragments)
        if self.fragments > self.every:
            raise ConfigurationError(
                f"fragments={self.fragments} in rounds of every={self.every} updates: at most one"
                f" fragment starts per update, so give at most {self.every}."
            )
        require_delay(self.delay, self.every)
        require_share("mix", self.mix, "the share of its own weights a replica keeps at a merge")

    def plan(self) -> Plan:
        return Plan(
            every=self.every,
            delay=self.delay,
            keep=self.mix,
            fragments=self.fragments,
            outer=partial(Step, settings=self),
        )
