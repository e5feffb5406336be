"""The contestants, as plain data: who runs, on which cores, with which settings."""

from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["unit", "bound", "data parallel", "torch pipelining", "offbeat", "asynchronous"]
MICRO_BATCHES = (2, 4, 8)

SCHEDULES = {
    "gpipe": ("GPipe", "GPipe"),
    "1f1b": ("1F1B", "1F1B"),
    "interleaved-1f1b": ("Interleaved1F1B", "interleaved 1F1B"),
    "interleaved-zero-bubble": ("InterleavedZeroBubble", "interleaved zero-bubble"),
    "zbv": ("ZBVZeroBubble", "ZBV"),
}
"""Our name for a schedule: torch's name, the name in prose."""

DDP = {
    "ddp": ("DDP, default", {}),
    "ddp-views": ("DDP, bucket views", {"gradient_as_bucket_view": True}),
    "ddp-tuned": (
        "DDP, bucket views, static graph, own buffers",
        {"gradient_as_bucket_view": True, "static_graph": True, "forward_sync_buffers": False},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One contestant; ``kind`` and ``settings`` say what its processes build."""

    name: str
    label: str
    family: Family
    kind: str
    processes: int = 2
    threads: int = 1
    cut: str | None = None
    """Which of the measured cuts it uses."""
    settings: dict[str, Any] = field(default_factory=dict)


def all_variants() -> list[Variant]:
    return [*_units(), *_asynchronous(), *_data_parallel(), *_synchronous(), *_torch_pipelining()]


def is_reference(variant: Variant) -> bool:
    """Whether it runs in every wave: the unit, the bounds, and one asynchronous method."""
    return variant.name in ("one-core", "offbeat-stale-weights") or variant.family == "bound"


def _units() -> list[Variant]:
    one = {"processes": 1, "cut": "two"}
    return [
        Variant(name="one-core", label="one core", family="unit", kind="plain", processes=1),
        Variant(
            name="stage-0", label="stage 0 alone", family="bound", kind="stage",
            settings={"stage": 0}, **one,  # type: ignore[arg-type]
        ),
        Variant(
            name="stage-1", label="stage 1 alone", family="bound", kind="stage",
            settings={"stage": 1}, **one,  # type: ignore[arg-type]
        ),
        Variant(
            name="both-stages", label="both stages, no messages", family="bound", kind="stage",
            cut="two",
        ),
    ]  # fmt: skip


def _asynchronous() -> list[Variant]:
    methods = {
        "stale-weights": ("StaleWeights", {}),
        "pipedream": ("PipeDream", {}),
        "fdg": ("FDG", {}),
        "dsp": ("DSP", {}),
        "adl": ("ADL, 2 micro-batches", {"accumulate": 2}),
    }
    return [
        Variant(
            name=f"offbeat-{name}",
            label=f"offbeat {label}",
            family="asynchronous",
            kind="offbeat",
            cut="recompute" if name == "dsp" else "two",
            settings={"method": name, "options": options},
        )
        for name, (label, options) in methods.items()
    ]


def _data_parallel() -> list[Variant]:
    two_threads = Variant(
        name="two-threads", label="one process, 2 threads", family="data parallel", kind="plain",
        processes=1, threads=2,
    )  # fmt: skip
    return [
        two_threads,
        *(
            Variant(name=name, label=label, family="data parallel", kind="ddp", settings=settings)
            for name, (label, settings) in DDP.items()
        ),
    ]


def _synchronous() -> list[Variant]:
    return [
        Variant(
            name=f"offbeat-{name}-4",
            label=f"offbeat {label}, 4 micro-batches",
            family="offbeat",
            kind="offbeat",
            cut="two",
            settings={"method": name, "options": {"micro_batches": 4}},
        )
        for name, label in (("gpipe", "GPipe"), ("1f1b", "1F1B"))
    ]


def _torch_pipelining() -> list[Variant]:
    return [
        Variant(
            name=f"torch-{name}-{parts}",
            label=f"torch {prose}, {parts} micro-batches",
            family="torch pipelining",
            kind="pipelining",
            cut=cut_name(name, parts),
            settings={"schedule": schedule, "micro_batches": parts},
        )
        for name, (schedule, prose) in SCHEDULES.items()
        for parts in MICRO_BATCHES
    ]


def chunks_of(schedule: str) -> int:
    """How many chunks two processes hold under a schedule."""
    return 2 if schedule in ("gpipe", "1f1b") else 4


def cut_name(schedule: str, parts: int) -> str:
    return "two" if chunks_of(schedule) == 2 else f"{schedule}-{parts}"
