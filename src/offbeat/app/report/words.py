"""Numbers as a reader wants them."""

from collections.abc import Sequence

MISSING = "-"
_GAP = "\N{NO-BREAK SPACE}"


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.01234), seconds(75.2), seconds(7384)
    ('12.3\\xa0ms', '1\\xa0min 15\\xa0s', '2\\xa0h 3\\xa0min')
    """
    if value is None:
        return MISSING
    if value >= 3600:
        return f"{int(value // 3600)}{_GAP}h {int(value % 3600 // 60)}{_GAP}min"
    if value >= 60:
        return f"{int(value // 60)}{_GAP}min {int(value % 60)}{_GAP}s"
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g}{_GAP}{unit}"
    return f"{value * 1e6:.3g}{_GAP}µs"


def size(count: float | None) -> str:
    """
    >>> size(512), size(2_500_000)
    ('512\\xa0B', '2.5\\xa0MB')
    """
    if count is None:
        return MISSING
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale:
            return f"{count / scale:.3g}{_GAP}{unit}"
    return f"{count:.0f}{_GAP}B"


def percent(share: float | None) -> str:
    """
    >>> percent(0.98765)
    '98.8\\xa0%'
    """
    return MISSING if share is None else f"{100 * share:.1f}{_GAP}%"


def number(value: float | None) -> str:
    """
    >>> number(0.123456), number(24_310.5), number(3)
    ('0.1235', '24,310', '3')
    """
    if value is None:
        return MISSING
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def listed(values: Sequence[object]) -> str:
    """
    >>> listed((6, 4, 2, 0))
    '6, 4, 2, 0'
    """
    return ", ".join(map(str, values)) or MISSING


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "stage"), plural(4, "replica")
    ('1 stage', '4 replicas')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
