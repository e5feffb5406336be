"""Test accuracy of the demo's methods over its six seeds, in percent."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.pages import slug
from benchmarks.stored import read_result


def accuracies() -> dict[str, list[float]]:
    """By method, of all seeds, after the last epoch."""
    found: dict[str, list[float]] = {}
    for path in sorted(Path(__file__).parent.glob("seed-*.json")):
        for run in read_result(path)["runs"]:
            found.setdefault(run["name"], []).append(100 * run["accuracy"][-1][1])
    return found


def facts() -> Iterator[tuple[str, float]]:
    for method, values in accuracies().items():
        yield slug(method), fmean(values)
        yield f"{slug(method)}.lowest", min(values)
        yield f"{slug(method)}.highest", max(values)


def tables() -> dict[str, str]:
    found = accuracies()
    lines = [
        f"| method | {' | '.join(found)} |",
        "|---" * (len(found) + 1) + "|",
        "| mean of six seeds | " + " | ".join(f"{fmean(v):.1f}" for v in found.values()) + " |",
        "| lowest to highest | "
        + " | ".join(f"{min(v):.1f} to {max(v):.1f}" for v in found.values())
        + " |",
    ]
    return {"accuracies": "\n".join(lines)}
