"""Streaming DiLoCo: the model is averaged in fragments, each late and mixed in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from offbeat.averaging.base import Fragments, Plan, require_delay, require_offset, require_share
from offbeat.averaging.diloco import OuterSettings, Step
from offbeat.averaging.division import named_fragments
from offbeat.errors import ConfigurationError
from offbeat.methods.base import require_count


@dataclass(frozen=True)
class StreamingDiLoCo(OuterSettings):
    """Each of ``fragments`` has its own round of ``every`` updates, shifted against the others'.

    A fragment's average change is started, arrives ``delay`` updates later, makes an outer step
    from the fragment's last global copy, and is merged: ``x <- mix x + (1 - mix) X``. Fragment p of
    P starts after updates ``(p+1) every / P + offset`` of a round; ``offset=-delay`` merges there,
    as torchft does. ``fragments`` says how many runs of blocks each stage is divided into, about
    equally large, or which modules are in each: ``[["embed", "blocks.0"], ["blocks.1", "head"]]``.
    Reference: Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv
    2501.18512).
    """

    name = "streaming-diloco"
    title = "Streaming DiLoCo"
    reference = "Douillard et al. 2025, arXiv 2501.18512"

    fragments: int | Sequence[Sequence[str]] = 2
    delay: int = 1
    mix: float = 0.5
    offset: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        fragments = self.fragments
        if isinstance(fragments, Sequence):
            object.__setattr__(self, "fragments", named_fragments(fragments))
        else:
            require_count("fragments", fragments)
        count = fragments if isinstance(fragments, int) else len(fragments)
        if count > self.every:
            raise ConfigurationError(
                f"fragments={count} in rounds of every={self.every} updates: at most one"
                f" fragment starts per update, so give at most {self.every}."
            )
        require_delay(self.delay, self.every)
        require_offset(self.offset, self.every)
        require_share("mix", self.mix, "the share of its own weights a replica keeps at a merge")

    def plan(self) -> Plan:
        return Plan(
            every=self.every,
            delay=self.delay,
            keep=self.mix,
            fragments=cast("int | Fragments", self.fragments),
            offset=self.offset,
            outer=partial(Step, settings=self),
        )
