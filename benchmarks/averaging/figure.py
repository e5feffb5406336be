"""Draws the gap to AllReduce: DaSGD's two merges against the progress kept, then the others.

python -m benchmarks.averaging.figure benchmarks/averaging/results.jsonl
python -m benchmarks.averaging.figure benchmarks/averaging/results.jsonl --table
"""

import argparse
from pathlib import Path
from statistics import fmean

from benchmarks.averaging.configurations import (
    BASELINE,
    CONFIGURATIONS,
    SETTINGS,
    Merge,
    dasgd_name,
    kept_by,
)
from benchmarks.averaging.summary import Summary, groups, summaries, table
from benchmarks.pictures import INK, plain
from benchmarks.stored import Row, read_rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette.
MERGES: dict[Merge, tuple[str, str, str]] = {
    "authors": ("#D55E00", "o", "authors' merge: part of the progress is dropped"),
    "mean-preserving": ("#0072B2", "D", "mean-preserving merge (progress=1)"),
}
OTHERS = "#009E73"
FLOOR = -25.0
"""Points; of the other methods, what lies lower is drawn at the edge."""


def draw(rows: list[Row]) -> Figure:
    found = {summary.name: summary for summary in summaries(rows) if summary.gaps}
    figure = Figure(figsize=(8.5, 7.2), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 2.3))[:, 0]
    left, right = above.subplots(1, 2, sharey=True)
    draw_dasgd(left, 4, found)
    draw_dasgd(right, 8, found)
    left.margins(y=0.15)  # room for the settings' names
    left.set_ylabel("accuracy minus AllReduce's, points")
    handles, labels = left.get_legend_handles_labels()
    above.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    draw_others(below.subplots(), found)
    return figure


def draw_dasgd(axes: Axes, every: int, found: dict[str, Summary]) -> None:
    """One period: both merges beside each other at the share that the authors' keeps."""
    for side, (merge, (colour, marker, words)) in zip((-1, 1), MERGES.items(), strict=True):
        points = []
        for setting in (setting for setting in SETTINGS if setting[0] == every):
            summary = found.get(dasgd_name(*setting, merge))
            if summary is not None:
                points.append((kept_by(*setting) + 0.008 * side, summary))
        points.sort(key=lambda point: point[0])
        for place, summary in points:
            gaps = summary.gaps
            axes.plot([place] * len(gaps), gaps, ".", color=colour, alpha=0.45, markersize=6)
        axes.plot(
            [place for place, _ in points],
            [fmean(summary.gaps) for _, summary in points],
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=1.2,
            label=words,
        )
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_title(f"DaSGD, an average every {every} updates", loc="left", fontsize=11)
    axes.set_xlabel("progress that the authors' merge keeps\n(small print: delay, keep)")
    settings = sorted((s for s in SETTINGS if s[0] == every), key=lambda s: kept_by(*s))
    for number, setting in enumerate(settings):
        # Neighbours that are close take turns in height.
        close = number > 0 and kept_by(*setting) - kept_by(*settings[number - 1]) < 0.1
        axes.annotate(
            f"{setting[1]}, {setting[2]:g}",
            (kept_by(*setting), 0),
            xytext=(0, 17 if close else 5),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=INK,
        )
    axes.set_xlim(0.15, 1.0)
    plain(axes)


def draw_others(axes: Axes, found: dict[str, Summary]) -> None:
    dasgd = {name for name, configuration in CONFIGURATIONS.items() if configuration.merge}
    names = [name for name in found if name != BASELINE and name not in dasgd][::-1]
    for place, name in enumerate(names):
        gaps, mean = found[name].gaps, fmean(found[name].gaps)
        inside = [max(FLOOR, gap) for gap in gaps]
        axes.plot(inside, [place] * len(gaps), ".", color=OTHERS, alpha=0.45, markersize=6)
        axes.plot(max(FLOOR, mean), place, "<" if mean < FLOOR else "s", color=OTHERS, markersize=7)
        axes.annotate(
            f"{mean:+.1f}",
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.axvline(0, color=INK, linewidth=0.8)
    labels = [name.replace("DiLoCo(8, f", "DiLoCo\n(8, f") for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=9)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_title("Other methods, with their default settings", loc="left", fontsize=11)
    axes.set_xlabel("accuracy minus AllReduce's, points (small dots: one seed each; right: mean)")
    plain(axes)


def chosen(rows: list[Row], lr: float | None) -> list[Row]:
    """One group of comparable rows: that of ``lr``, or the one where AllReduce does best."""
    candidates = [
        group
        for group in groups(rows)
        if any(row["configuration"] == BASELINE for row in group)
        and (lr is None or group[0]["lr"] == lr)
    ]
    if not candidates:
        raise SystemExit(f"no run of {BASELINE} to compare with.")
    return max(
        candidates,
        key=lambda group: fmean(r["accuracy"] for r in group if r["configuration"] == BASELINE),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("results", type=Path)
    parser.add_argument("--table", action="store_true", help="print Markdown instead")
    parser.add_argument("--lr", type=float, default=None, help="by default AllReduce's best")
    parser.add_argument("--out", type=Path, default=None, help="by default beside the results")
    arguments = parser.parse_args()
    rows = read_rows(arguments.results)
    if arguments.table:
        print(table(rows))
        return
    out = arguments.out or arguments.results.with_suffix(".png")
    draw(chosen(rows, arguments.lr)).savefig(out, dpi=110)
    print(f"saved {out}")


if __name__ == "__main__":
    main()
