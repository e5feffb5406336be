"""The documentation, carried out: sessions print what they show, examples run, tables are true."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import averaging_oracles
import oracles
import test_averaging
import test_oracles
from helpers import OPTIMIZERS, assert_same_bits
from offbeat import methods, transport
from offbeat.app import cli
from offbeat.averaging import AVERAGINGS, Averaging, averaging_named
from offbeat.cutting import ways
from offbeat.methods import METHODS, Method
from offbeat.schedules.schedule import Schedule
from offbeat.schedules.table import Table
from offbeat.schedules.timeline import Costs, timeline

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CHOOSE = ROOT / "docs" / "choose-a-method.md"
ADD = ROOT / "docs" / "add-a-method.md"
AVERAGE = ROOT / "docs" / "add-an-averaging.md"
REPLICAS = ROOT / "docs" / "replicas.md"
ADD_TRANSPORT = ROOT / "docs" / "add-a-transport.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
QUICK = ROOT / "docs" / "quick-start.md"
COMMANDS = ROOT / "docs" / "command-line.md"
DESIGN = ROOT / "DESIGN.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, DESIGN, ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("README.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    """Of its first line of text, counted from 1."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    made = [Block(page, text[: m.start(2)].count("\n") + 1, m[1], m[2]) for m in found]
    return [block for block in made if block.language in languages]


def by_name(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


# ------------------------------------------------------------------ sessions


@dataclass(frozen=True)
class Session:
    """A command line of a page and what the page says it prints."""

    page: Path
    command: str
    printed: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.command}"


def sessions(page: Path) -> list[Session]:
    made = []
    for block in blocks(page, "console", "text"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            made.append(Session(page, command, printed))
    return [session for session in made if session.command.startswith("offbeat ")]


SESSIONS = [session for page in PAGES for session in sessions(page)]


@pytest.mark.parametrize("session", SESSIONS, ids=str)
def test_a_session_prints_what_the_page_shows(
    session: Session,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if session.page == ADD:
        join_the_registry(monkeypatch)
    after_a_run = ("offbeat report", "offbeat verify")
    if session.command.startswith(after_a_run):  # the one before it on the page
        (before, *_) = (s for s in sessions(session.page) if s.command.startswith("offbeat train"))
        carry_out(before)
        capsys.readouterr()
    carry_out(session)
    caught = capsys.readouterr()
    trains = session.command.startswith(("offbeat train", "offbeat study"))
    told = measured_out if trains else str
    printed = caught.out + caught.err
    assert told(printed) == told(session.printed), f"paste this into {session.page}:\n{printed}"


def carry_out(session: Session) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(shlex.split(session.command)[1:])
    assert not ended.value.code, session


def measured_out(text: str) -> str:
    """Without what differs from machine to machine: times, rates, and scores with them."""
    return re.sub(r"[+-]?\d+\.\d+|\d+(?= rows/s)", "#", re.sub(r" +", " ", text))


def test_a_session_prints_the_same_in_a_process_of_its_own() -> None:
    session = next(s for s in SESSIONS if s.command == "offbeat corrections")
    words = [sys.executable, "-m", *shlex.split(session.command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == session.printed


def test_the_page_of_the_command_line_has_every_command_and_shows_what_it_prints() -> None:
    rows = re.findall(r"^\| `offbeat (\w+)` \|", COMMANDS.read_text(), re.MULTILINE)
    known = {
        command.callback.__name__ for command in cli.app.registered_commands if command.callback
    }
    assert len(rows) == len(known)
    assert set(rows) == known
    shown = {session.command.split()[1] for session in SESSIONS}
    # What "methods" prints is the README's table; the other three are long, and in test_listing.py.
    assert shown == known - {"methods", "averagings", "models", "data"}


# ------------------------------------------------------------------ examples


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=by_name)
def test_python_examples_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session per page, as a reader would paste it, in a folder where it may write."""
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ways, "WAYS", ways.WAYS)  # a page adds one
    monkeypatch.setattr(transport, "LINKS", transport.LINKS)  # and so does another
    namespace: dict[str, Any] = {"__name__": page.stem}
    for name in ("wandb", "mlflow", "trackio"):  # nobody needs them but who has them
        monkeypatch.setitem(sys.modules, name, StandIn(name))
    for block in blocks(page, "python"):
        run(block, namespace)
    if page == ADD:
        schedule = namespace["Unstashed"]().schedule(3)
        golden = (tmp_path / "tests" / "golden" / "unstashed.txt").read_text()
        table = schedule.table(4)
        assert golden == f"{schedule}\n\n{table}\n\n{table.grid()}\n"


class StandIn(ModuleType):
    """Takes every call that a logger makes, and notes it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("__"):
            raise AttributeError(verb)

        def call(*given: Any, **named: Any) -> StandIn:
            self.calls.append((verb, given or named))
            return self

        return call


@pytest.mark.parametrize(
    ("name", "module", "verbs"),
    [
        ("WandB", "wandb", ["init", "log", "finish"]),
        ("MLflow", "mlflow", ["start_run", "log_dict", "log_metrics", "end_run"]),
        ("Trackio", "trackio", ["init", "log", "finish"]),
    ],
)
def test_the_loggers_of_the_page_are_told_everything(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, verbs: list[str]
) -> None:
    stand_in = StandIn(module)
    monkeypatch.setitem(sys.modules, module, stand_in)
    namespace: dict[str, Any] = {"__name__": "tracking"}
    (block,) = (b for b in blocks(COMMANDS, "python") if f"class {name}:" in b.text)
    run(block, namespace)
    logger = namespace[name]()
    logger.begin({"lr": 0.02})
    logger.log({"test/loss": 0.5}, 12)
    logger.end("finished")
    assert [verb for verb, _ in stand_in.calls] == verbs
    assert ({"test/loss": 0.5},) in [given for _, given in stand_in.calls]


def run(block: Block, namespace: dict[str, Any]) -> None:
    text = "\n" * (block.line - 1) + block.text  # a traceback then names the page's own line
    # Not with the __future__ imports of this file, which the reader does not have.
    exec(compile(text, str(block.page), "exec", dont_inherit=True), namespace)


# ------------------------------------------------------------------ the worked example


def worked_example() -> type[Method]:
    namespace: dict[str, Any] = {"__name__": "unstashed"}
    run(blocks(ADD, "python")[0], namespace)
    made: type[Method] = namespace["Unstashed"]
    assert issubclass(made, Method)
    return made


def join_the_registry(monkeypatch: pytest.MonkeyPatch) -> type[Method]:
    """What the two lines of the page do, in every module that has read the list."""
    made = worked_example()
    for name, module in list(sys.modules.items()):
        if name.startswith("offbeat") and vars(module).get("METHODS") is METHODS:
            monkeypatch.setattr(module, "METHODS", (*METHODS, made))
    return made


def added(diff: Block) -> str:
    lines = diff.text.splitlines()
    return "\n".join(line[1:].strip() for line in lines if line.startswith("+"))


def test_the_worked_example_equals_the_oracle_of_its_case() -> None:
    made = worked_example()
    *_, case_diff = blocks(ADD, "diff")
    known = {**vars(test_oracles), "Unstashed": made}
    case = eval(f"{{{added(case_diff)}}}", known)["unstashed"]
    assert case.oracle is oracles.current
    for stages in (1, 2, 3, 4):
        test_oracles.compare(
            case.method(stages), case.oracle, stages, stages, OPTIMIZERS["momentum"],
            **case.settings(stages),
        )  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_the_worked_example_passes_the_checks_of_the_list(stages: int) -> None:
    method = worked_example()()
    schedule = method.schedule(stages)
    schedule.table(5).check()
    assert schedule.lags == method.lags(stages)
    assert Schedule.parse(str(schedule)) == schedule
    assert Table.parse(str(schedule.table(3))) == schedule.table(3)


def test_the_worked_example_is_found_by_name_and_its_docstring_is_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = join_the_registry(monkeypatch)
    assert methods.method_named("Unstashed") == made()
    assert_examples_hold(made)


def assert_examples_hold(kind: type) -> None:
    assert kind.__doc__ is not None
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    example = parser.get_doctest(kind.__doc__, {kind.__name__: kind}, kind.__name__, None, None)
    assert example.examples
    assert runner.run(example).failed == 0


def changed_by(diff: Block, root: Path = ROOT) -> Path:
    """The file that a page names last before a diff."""
    before = "\n".join(diff.page.read_text().splitlines()[: diff.line - 1])
    named = re.findall(r"\]\((?!http)([^)#\s]+)|`((?:src|tests)/[^`\s]+)`", before)
    linked, path = map(str, named[-1])
    return root / path if path else (root / "docs" / linked).resolve()


def two_sides(diff: Block) -> tuple[str, str]:
    """What a diff expects to find, and what it leaves."""
    lines = [line or " " for line in diff.text.splitlines()]
    old, new = ([line[1:] for line in lines if line[0] != other] for other in "+-")
    return "\n".join(old), "\n".join(new)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("add-*.md")), ids=by_name)
def test_diffs_fit_the_files_they_change(page: Path) -> None:
    """What a reader should find beside the new line is there today, in this order, and once."""
    diffs = blocks(page, "diff")
    assert len(diffs) > 1
    for diff in diffs:
        old, _ = two_sides(diff)
        file = changed_by(diff)
        assert file.read_text().count(old) == 1, f"{diff} does not fit {file}"


# ------------------------------------------------------------------ the worked averaging


@pytest.fixture
def gossip(monkeypatch: pytest.MonkeyPatch) -> type[Averaging]:
    """The page's class, with its oracle, its case and its line in the list."""
    namespace: dict[str, Any] = {"__name__": "gossip"}
    rule, *_, oracle = blocks(AVERAGE, "python")
    run(rule, namespace)
    run(oracle, namespace)
    monkeypatch.setattr(averaging_oracles, "gossip", namespace["gossip"], raising=False)
    case_diff, *_ = blocks(AVERAGE, "diff")
    cases = eval(f"{{{added(case_diff)}}}", {**vars(test_averaging), **namespace})
    monkeypatch.setitem(test_averaging.CASES, "gossip", cases["gossip"])
    kind: type[Averaging] = namespace["Gossip"]
    monkeypatch.setattr("offbeat.averaging.AVERAGINGS", (*AVERAGINGS, kind))
    return kind


ASKED = [
    test
    for name, test in vars(test_averaging).items()
    if name.startswith("test_") and test_averaging.EVERY.mark in getattr(test, "pytestmark", [])
]


@pytest.mark.parametrize("test", ASKED, ids=lambda test: test.__name__)
def test_the_worked_averaging_passes_what_the_list_is_asked(
    test: Any, gossip: type[Averaging], tmp_path: Path
) -> None:
    given = {"kind": gossip, "tmp_path": tmp_path}
    test(**{name: given[name] for name in inspect.signature(test).parameters})


def test_the_worked_averaging_is_found_by_name_and_equals_its_oracle(
    gossip: type[Averaging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an odd and an even number of replicas; and one with other partners does not."""
    assert len(ASKED) > 4
    assert averaging_named("Gossip", every=2) == gossip(every=2)  # type: ignore[call-arg]
    assert_examples_hold(gossip)
    case = test_averaging.case_of(gossip)
    for replicas in (2, 3, 4):
        test_averaging.check(case, replicas)
    monkeypatch.setitem(gossip.plan.__globals__, "neighbour", None)  # all with all
    with pytest.raises(AssertionError, match="step"):
        test_averaging.check(case, 4)


# ------------------------------------------------------------------ tables


def table_after(page: Path, head: str) -> str:
    """The table of a page that begins with this line."""
    text = page.read_text()
    assert text.count(head) == 1, f"{page.name} has no table, or two, that begin with {head}"
    return text[text.index(head) :].split("\n\n")[0]


def as_table(head: str, rows: list[list[str]]) -> str:
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def test_the_table_of_methods_is_the_registry() -> None:
    head = "| name | lag | weight copies | backward rule | waits for | reference |"
    rows = [
        [
            f"`{method.name}`",
            method.lag_formula,
            method.copies,
            getattr(method, "backward", "-"),
            method.waits_for,
            method.reference,
        ]
        for method in (kind() for kind in METHODS)
    ]
    expected = as_table(head, rows)
    assert table_after(README, head) == expected, f"paste this into the README:\n{expected}"


def test_the_table_of_averagings_is_the_registry() -> None:
    table = table_after(REPLICAS, "| name | what is averaged | merged | reference |")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [(row[0], row[-1]) for row in rows] == [
        (f"`{kind.name}`", kind.reference) for kind in AVERAGINGS
    ]


@pytest.mark.parametrize("kind", AVERAGINGS, ids=lambda kind: kind.name)
def test_the_page_of_replicas_has_a_row_for_every_averaging(kind: type[Averaging]) -> None:
    row = f"| `{kind.__name__}("
    assert row in REPLICAS.read_text(), f"add a row that begins with {row} to {REPLICAS.name}"


def test_troubles_are_headed_by_real_messages() -> None:
    """Every quoted heading is in the source, word for word between its gaps."""
    source = re.sub(r'"\s*\n?\s*f?"', "", "".join(
        path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))
    ))  # fmt: skip
    source = re.sub(r"\{[^{}]*(\{[^{}]*\})?[^{}]*\}", "...", source)
    headings = re.findall(r"^## `(.+)`", TROUBLES.read_text(), re.MULTILINE)
    assert len(headings) > 10
    for heading in headings:
        pieces = re.split(r"\.\.\.|'\.\.\.'|\b\d+\b", heading)
        for piece in pieces:
            words = piece.strip(" ():=',").replace("`", "")
            assert words in source, f"{heading!r}: no message says {words!r}"


def test_the_table_of_costs_is_read_off_the_schedules() -> None:
    head = (
        "| method | lag per stage | weight copies | held at stage 0 | arithmetic | speed-up"
        " | with slow messages |"
    )
    rows = [
        [
            method.name,
            " ".join(map(str, method.lags(4))),
            method.copies,
            held_at_stage_0(method),
            "4/3" if method.rule == "recompute" else "1",
            f"{timeline(method, 4).speed_up:.2f}",
            f"{timeline(method, 4, costs=Costs(hop=0.5)).speed_up:.2f}",
        ]
        for method in (kind() for kind in METHODS)
    ]
    expected = as_table(head, rows)
    assert table_after(CHOOSE, head) == expected, f"paste this into {CHOOSE.name}:\n{expected}"


def held_at_stage_0(method: Method) -> str:
    schedule = method.schedule(4)
    held = most = 0
    for action in schedule.table(20).order(0):
        held += {"F": 1, "B": -1, "U": 0}[action.kind]
        most = max(most, held)
    what = "input" if method.rule == "recompute" else "graph"
    part = f" of 1/{schedule.micro_batches} batch" if schedule.micro_batches > 1 else ""
    return f"{most} {what}{'s' if most > 1 else ''}{part}"


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.name)
def test_a_loss_is_late_by_the_lag_of_stage_0(kind: type[Method], stages: int) -> None:
    """What the training loop's page says of ``step`` for two stages or more."""
    method = kind()
    assert method.schedule(stages).loss_delay == method.lags(stages)[0]


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_point_to_something(page: Path) -> None:
    found_in = r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\""
    for target in ("".join(pair) for pair in re.findall(found_in, page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(found), f"{page.name} links to {target}: no such heading"


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes them addresses."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.timeout(300)
def test_the_quick_start_gives_the_same_bits_alone_and_in_four_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks(QUICK, "python")[0].text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = {}
    for name, launch in {
        "alone": [],
        "four": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"],
    }.items():
        (tmp_path / name).mkdir()
        words = [sys.executable, *launch, str(script)]
        done = subprocess.run(words, env=environment, cwd=tmp_path / name, timeout=240, check=False,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "terminate called" not in done.stderr
        found[name] = torch.load(tmp_path / name / "model.pt", weights_only=True)
    assert_same_bits(found["alone"], found["four"])


# ------------------------------------------------------------------ the design


PLACES = [ROOT / "src" / "offbeat", ROOT / "tests", ROOT]


def test_the_design_names_files_that_exist() -> None:
    """As ``stages/stage.py`` of the package, a file of the tests, or a path of the repository."""
    names = re.findall(r"`((?:[\w-]+/)*(?:[\w-]+\.(?:py|md|toml)|[\w-]+/))`", DESIGN.read_text())
    assert len(names) > 60
    missing = sorted({n for n in names if not any((place / n).exists() for place in PLACES)})
    assert not missing, f"DESIGN.md names {missing}"


def test_the_design_names_what_is_in_its_files() -> None:
    """As ``METHODS`` in ``methods/__init__.py``, or ``test_oracles.py`` (``CASES``)."""
    text = DESIGN.read_text()
    pairs = [(file, name) for name, file in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)]
    for file, names in re.findall(r"`([\w/]+\.py)` \(([^)]*)\)", text):
        pairs += [(file, name) for name in re.findall(r"`(\w+)`", names)]
    assert len(pairs) > 15
    for file, name in pairs:
        (path, *_) = (place / file for place in PLACES if (place / file).exists())
        assert re.search(rf"\b{name}\b", path.read_text()), f"DESIGN.md: {file} has no {name}"


def test_the_design_has_every_folder_of_the_package() -> None:
    folders = {path.parent.name for path in (ROOT / "src" / "offbeat").glob("*/__init__.py")}
    assert not {name for name in folders if f"`{name}/`" not in DESIGN.read_text()}
