"""What a run says of its staleness, small enough to be kept and plain enough for others to check.

docs/certificate.md explains every name; examples/check_certificate.py checks one without offbeat.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.records.rows import Part
from offbeat.records.tally import Counts, Tally

FORMAT = 1


def certificate(
    tally: Tally, declared: Sequence[int] | None, parts: Sequence[Part], uncounted: int
) -> dict[str, Any]:
    """``declared``: the lag per stage that the method promises, in updates."""
    return {
        "format": FORMAT,
        "declared": None if declared is None else list(declared),
        "stages": [_line(*place, counts) for place, counts in sorted(tally.items())],
        "rows": tally.rows,
        "files": [{"name": Path(p.path).name, "rows": p.rows, "sha256": p.sha256} for p in parts],
        "rows_in_no_file": uncounted,
    }


def _line(replica: int, stage: int, counts: Counts) -> dict[str, Any]:
    return {
        "replica": replica,
        "stage": stage,
        "updates": counts.updates,
        "version": counts.version,
        "lags": {str(lag): counts.lags[lag] for lag in sorted(counts.lags)},
        "averages": {
            "merged": counts.merged,
            "newest": counts.newest_merged,
            "delays": {str(delay): counts.delays[delay] for delay in sorted(counts.delays)},
        },
    }


def trouble_of(told: dict[str, Any]) -> str | None:
    """Why these words are no certificate that can be checked, if they are none."""
    try:
        sound = (
            all(_is_count(lag) for lag in told["declared"])
            and all(_is_line(line, len(told["declared"])) for line in told["stages"])
            and all(_is_file(file) for file in told["files"])
            and all(
                _is_name(name) and isinstance(digest, str)
                for kind in ("results", "checkpoints")
                for name, digest in told.get(kind, {}).items()
            )
        )
    except (TypeError, LookupError, ValueError, AttributeError):
        sound = False
    return None if sound else "it is not made as a certificate is (docs/certificate.md)"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_name(name: Any) -> bool:
    """Of a file that lies beside the certificate, and nowhere else."""
    return isinstance(name, str) and name == Path(name).name


def _is_line(line: dict[str, Any], stages: int) -> bool:
    counts = [line["replica"], line["stage"], *line["lags"].values()]
    lags = [int(lag) for lag in line["lags"]]
    return all(map(_is_count, [*counts, *lags])) and line["stage"] < stages


def _is_file(file: dict[str, Any]) -> bool:
    return _is_name(file["name"]) and _is_count(file["rows"]) and isinstance(file["sha256"], str)


def excess(told: dict[str, Any]) -> list[str]:
    """Where a certificate tells of more lag than was declared."""
    found = []
    for line in told["stages"]:
        bound = told["declared"][line["stage"]]
        late = {int(lag): count for lag, count in line["lags"].items() if int(lag) > bound}
        if late:
            found.append(
                f"stage {line['stage']} of replica {line['replica']}: {sum(late.values())}"
                f" micro-batches with a lag of up to {max(late)}, and {bound} was declared"
            )
    return found
