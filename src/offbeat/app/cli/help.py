"""Help in groups: what belongs together stands together, under a heading."""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class GroupedCommand(TyperCommand):
    """Its options under the headings that they were given as ``rich_help_panel``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = [(_heading(p, "Options"), p.get_help_record(ctx)) for p in self.get_params(ctx)]
        _write(formatter, [(heading, record) for heading, record in records if record is not None])


class GroupedCommands(TyperGroup):
    """Its commands under their headings, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        records = [
            (_heading(command, "Commands"), (name, command.get_short_help_str(1000)))
            for name, command in commands
            if command is not None
        ]
        _write(formatter, records)


def _heading(what: Any, usual: str) -> str:
    return getattr(what, "rich_help_panel", None) or usual


def _write(formatter: Any, records: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """In the order in which headings come; all with columns of one width."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for heading, record in records:
        groups.setdefault(heading, []).append(record)
    widest = max((len(name) for rows in groups.values() for name, _ in rows), default=0)
    for heading, rows in groups.items():
        with formatter.section(heading):
            padded = [(name.ljust(min(widest, 28)), text) for name, text in rows]
            formatter.write_dl(padded)
