"""Pages whose measured numbers and tables are written by `python -m benchmarks.facts`.

A comment behind a number names the fact that it is; the digits behind the point stay as many as
the author wrote. A fact with an interval is three numbers, of which a page shows

    1.96<!--two_cores.resnet20.pipedream-->                         the first
    1.96 (1.90 to 2.02)<!--two_cores.resnet20.pipedream:interval--> all
    1.90 to 2.02<!--two_cores.resnet20.pipedream:range-->           the last two
    level<!--two_cores.resnet20.pipedream.of.ddp:verdict-->         what they say of a ratio

`:negative` is the first with its sign turned. A whole table stands between two comments:

    <!--table two_cores.rivals-->
    <!--end-->

What nobody measured here (a setting, a model's number, a quotation) is marked as that: a number by
`<!--not measured-->` behind it, a passage by a line of it before and `<!--end-->` behind.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.intervals import verdict

Fact = float | list[float]

MARK = re.compile(r"<!--([a-z]\w*\.[\w.+-]+)(?::(interval|range|verdict|negative))?-->")
TABLE = re.compile(r"<!--table ([\w.-]+)-->\n(.*?)<!--end-->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?![\w])")
WORD = re.compile(r"level|ahead|behind")
NOT_MEASURED = re.compile(
    rf"^<!--not measured-->$.*?<!--end-->|{NUMBER.pattern}[^\d\n<]{{0,3}}<!--not measured-->",
    re.DOTALL | re.MULTILINE,
)
OTHERS = re.compile(
    r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->|95 %|(?:arXiv|Python|[Tt]orch) \d+\.\d+",
    re.DOTALL | re.MULTILINE,
)
"""Code, links, comments, the share that intervals cover, numbers of papers and versions."""
MEASURED = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+(?![\w.])|(?= ?%))")


class Unknown(ValueError):
    """A page names what nobody measured."""


def slug(words: str) -> str:
    """A name as part of the name of a fact.

    >>> slug("1F1B, M=8 + spike"), slug("2(K-1-k)")
    ('1f1b-m8-spike', '2-k-1-k')
    """
    return re.sub(r"[^a-z0-9.]+", "-", words.lower().replace("=", "")).strip("-.")


def written(number: str, value: float) -> str:
    """The value as the number that stands there was written.

    >>> written("1.96", 2.0), written("+0.3", -0.01), written("1,500", 2345.6)
    ('2.00', '0.0', '2,346')
    """
    digits = len(number.partition(".")[2])
    sign = "+" if number.startswith("+") else "-"
    text = f"{value:{sign}{',' if ',' in number else ''}.{digits}f}"
    return re.sub(r"^[+-](?=[0.]+$)", "", text)


def shown(name: str, part: str | None, facts: Mapping[str, Fact]) -> list[float]:
    """The numbers that stand before a mark."""
    if name not in facts:
        raise Unknown(f"no fact is named {name}")
    fact = facts[name]
    values = fact if isinstance(fact, list) else [fact]
    if part is not None and part != "negative" and len(values) != 3:
        raise Unknown(f"{name} has no interval")
    if part == "interval":
        return values
    if part == "range":
        return values[1:]
    return [-values[0] if part == "negative" else values[0]]


def with_facts(text: str, facts: Mapping[str, Fact], tables: Mapping[str, str]) -> str:
    """The page with every marked number and table as it was measured."""

    def table(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise Unknown(f"no table is named {match[1]}")
        return f"<!--table {match[1]}-->\n{tables[match[1]]}\n<!--end-->"

    made, rest = "", TABLE.sub(table, text)
    while mark := MARK.search(rest):
        name, part = mark[1], mark[2]
        before = rest[: mark.start()]
        if part == "verdict":
            values = shown(name, "interval", facts)
            before = _replaced(before, WORD, [verdict(values)], mark[0])
        else:
            before = _replaced(before, NUMBER, shown(name, part, facts), mark[0])
        made, rest = made + before + mark[0], rest[mark.end() :]
    return made + rest


def _replaced(text: str, kind: re.Pattern[str], values: Sequence[float | str], mark: str) -> str:
    """With the last such words, between this mark and the one before it, replaced."""
    places = list(kind.finditer(text))[-len(values) :]
    if len(places) < len(values) or "\n\n" in text[places[0].start() :]:
        raise Unknown(f"{mark} needs {len(values)} numbers or words before it")
    for place, value in reversed(list(zip(places, values, strict=True))):
        word = value if isinstance(value, str) else written(place[0], value)
        text = text[: place.start()] + word + text[place.end() :]
    return text


def unmarked(text: str) -> Iterator[str]:
    """Numbers with a point or in percent that no mark and no table vouches for.

    >>> list(unmarked("3 stages lose 1.2<!--a.b--> points, 4.5 in `0.1`, 30 % <!--x-->"))
    ['4.5', '30']
    """
    text = NOT_MEASURED.sub("", TABLE.sub("", text))
    start = 0
    for mark in [*MARK.finditer(text), None]:
        part = text[start : mark.start()] if mark else text[start:]
        count = {"interval": 3, "range": 2, "verdict": 0}.get(mark[2], 1) if mark else 0
        places = list(NUMBER.finditer(part))
        kept = part[: places[-count].start()] if 0 < count <= len(places) else part
        yield from MEASURED.findall(OTHERS.sub("", kept))
        start = mark.end() if mark else start


def pages(root: Path) -> list[Path]:
    """All that may show what was measured."""
    kinds = ("README.md", "docs/*.md", "benchmarks/README.md", "benchmarks/*/README.md")
    return [page for kind in kinds for page in sorted(root.glob(kind))]
