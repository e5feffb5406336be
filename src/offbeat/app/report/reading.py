"""How to read the page."""

from offbeat.app.report.markup import Markup, join, tag


def reading() -> Markup:
    entries = (
        (
            "Stage",
            "a consecutive part of the model; stage 0 is beside the data. With several replicas,"
            " r1 stage 2 is stage 2 of replica 1.",
        ),
        (
            "Lag",
            "how many updates a stage made between a micro-batch's forward and the update that"
            " uses its gradient. 0 is ordinary training.",
        ),
        (
            "Version",
            "how many updates the weights have had. A forward reads one, an update writes the"
            " next.",
        ),
        (
            "Measured timeline",
            "when each stage really worked. Gaps are waiting. A run in one process does one"
            " thing at a time, so its stages do not overlap.",
        ),
        (
            "Planned timeline",
            "the method's order of work with equal costs at all stages: what is possible, not"
            " what was reached.",
        ),
        ("Curves", "of more than 400 values show means of neighbours."),
        (
            "Gap",
            "accuracy minus that of the synchronous run, in points. One seed each: a small gap"
            " may be chance.",
        ),
        (
            "Trace",
            "of every run, beside this page: open it in Perfetto or chrome://tracing.",
        ),
    )
    return tag("dl", *(join([tag("dt", term), tag("dd", text)]) for term, text in entries))
