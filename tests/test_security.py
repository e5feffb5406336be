"""What may be trusted: nothing is unpickled that need not be, and nothing listens to strangers."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jobs
import offbeat
from offbeat.checkpoints import tensorfile
from offbeat.errors import WorkerLost
from offbeat.records import disk
from offbeat.transport.base import Key
from offbeat.transport.shared import Arena, Window
from offbeat.transport.wire import Arrival, pack

ROOT = Path(__file__).parent.parent
PACKAGE = Path(offbeat.__file__).parent

# The launcher and its children exchange a call and its result through a folder that only their
# user can open; batches of CIFAR are read by an unpickler that knows nothing but arrays.
MAY_PICKLE = {"engines/launcher.py", "engines/child.py", "zoo/data/formats.py"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def is_set(call: ast.Call, name: str) -> bool:
    return any(k.arg == name and ast.unparse(k.value) == "True" for k in call.keywords)


def test_the_package_runs_no_text_and_loads_no_object() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        imported = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert name in MAY_PICKLE or not imported & {"pickle", "dill", "shelve", "marshal", "yaml"}
        for function, call in calls(path):
            assert function not in ("eval", "exec", "os.system", "tempfile.mktemp"), name
            assert function.split(".")[-1] not in OBJECT_COLLECTIVES, name
            assert not is_set(call, "shell"), name
            assert not function.endswith(("extractall", ".extract")), name


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks", "tests"])
def test_weights_are_loaded_as_weights_only(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for function, call in calls(path):
            if function == "torch.load":
                assert is_set(call, "weights_only"), path


def test_pages_load_weights_as_weights_only() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for line in page.read_text().splitlines():
            assert "torch.load(" not in line or "weights_only=True" in line, f"{page}: {line}"


def test_processes_exchange_no_objects() -> None:
    """Everything a user may ask of several processes, with unpickling forbidden."""
    assert offbeat.launch(jobs.train_without_pickle, 4, timeout_s=100) == [True] * 4


@pytest.mark.fresh_processes  # the parent of a fork is not who launched it
def test_launch_listens_on_this_machine_alone() -> None:
    """Its store once listened on every address of the machine."""
    for addresses in offbeat.launch(jobs.listening_addresses, 2):
        assert len(addresses) > 2
        assert all(address == "0100007F" for address in addresses), addresses


# ------------------------------------------------------------------------- messages


def header(**changes: Any) -> bytes:
    """A sound message's header with something else in it."""
    words = json.loads(pack(Key("activation", 1, 0), torch.ones(100)).header)
    for path, value in changes.items():
        *way, last = path.split("__")
        place: Any = words
        for step in way:
            place = place[int(step)] if isinstance(place, list) else place[step]
        place[last] = value
    return json.dumps(words).encode()


def test_a_sound_message_arrives() -> None:
    arrival = Arrival(header())
    arrival.buffers[0].copy_(torch.ones(100).view(torch.uint8))
    assert torch.equal(arrival.message(torch.device("cpu")), torch.ones(100))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        header(key=["activation", 1]),
        header(key=["activation", "1", 0, 0]),
        header(key=["__class__", 1, 0, 0]),
        header(nest={"x": 1}),
        header(nest={"tensor": 9}),
        header(nest={"tuple": 1, "dict": []}),
        header(nest={"dict": [[[1], 2]]}),
        header(nest={"numpy": ["|O", "00" * 8]}),
        header(nest={"device": "/etc/passwd"}),
        header(tensors__0__dtype="load"),
        header(tensors__0__dtype="hub"),
        header(tensors__0__dtype=3),
        header(tensors__0__size=[-4]),
        header(tensors__0__size=[0, -1], tensors__0__stride=[1, 1], tensors__0__inline=""),
        header(tensors__0__size=[1 << 60]),
        header(tensors__0__stride=[1 << 40]),
        header(tensors__0__stride=[1, 1]),
        header(tensors__0__grad="no"),
        header(tensors__0__inline="zz"),
        header(tensors__0__inline="00"),
        header(tensors__0__place="../../../../etc/passwd"),
        header(tensors__0__place=10_000),
    ],
    ids=repr,
)
def test_another_message_is_refused_with_words(raw: bytes) -> None:
    with pytest.raises((WorkerLost, OSError)) as caught:
        Arrival(raw, Window(1 << 30, "secret").look).message()
    if caught.type is WorkerLost:
        assert "a message that is not this library's arrived" in str(caught.value)


def test_names_in_a_message_reach_no_file_and_no_function() -> None:
    own = Window(os.getpid(), "secret").look
    with pytest.raises(WorkerLost, match=r"file '../cmdline' is not in shared memory"):
        Arrival(header(tensors__0__place="../cmdline"), own)
    with pytest.raises(WorkerLost, match="'load' is no type of tensor"):
        Arrival(header(tensors__0__dtype="load"), own)


def test_a_message_reaches_no_file_but_the_memory_announced_for_its_connection(
    tmp_path: Path,
) -> None:
    """A number in a header once had any open file of the sender mapped, read and written to."""
    private = tmp_path / "private"
    private.write_bytes(b"x" * (1 << 16))
    other = Arena("other")
    other_link = other.room_for(1 << 15)
    unsealed = os.memfd_create("offbeat-secret")
    os.truncate(unsealed, 1 << 16)
    memory = Arena("secret")
    lot = memory.room_for(1 << 15)
    assert lot is not None
    assert other_link is not None
    window = Window(os.getpid(), "secret")
    with private.open("r+b") as opened:
        for file, words in (
            (opened.fileno(), "is not shared memory of this connection"),
            (other_link[0], "is not shared memory of this connection"),
            (unsealed, "could become shorter"),
        ):
            with pytest.raises(WorkerLost, match=words):
                Arrival(header(tensors__0__place=file), window.look)
    os.close(unsealed)
    assert private.read_bytes() == b"x" * (1 << 16)
    room = window.look(lot[0], 1 << 15)
    with pytest.raises(ValueError, match=f"file {lot[0]} holds no message of 65536 bytes"):
        window.look(lot[0], 1 << 16)
    del room  # gives the lot back
    with pytest.raises(ValueError, match="holds no message"):
        window.look(lot[0], 1 << 15)
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(lot[0], 100)


def test_shared_memory_is_not_looked_for_where_there_is_none() -> None:
    with pytest.raises(WorkerLost, match="nobody knows the place 3"):
        Arrival(header(tensors__0__place=3))


def test_a_damaged_message_ends_the_run_and_hangs_nobody() -> None:
    with pytest.raises(WorkerLost, match=r"^a message that is not this library's arrived"):
        offbeat.launch(jobs.send_a_damaged_message, 2, timeout_s=60)


# ------------------------------------------------------------------------- the page

YOURS = "it says what is the user's to decide; nothing is promised"
TORCH = "it says what PyTorch does, and what follows from it for the user"
PROMISES: dict[str, str] = {
    "**Your own code**: the script, the model": YOURS,
    "**The processes of a run trust each other.** They talk through": TORCH,
    "Whoever can reach its ports can join": TORCH,
    "On a machine with other users that includes": TORCH,
    "**The user of the machine.** Files are as private": (
        "test_security.py::test_files_are_as_private_as_the_user_has_it"
    ),
    "Shared memory between processes of one host has no name": (
        "test_security.py::test_shared_memory_has_no_name_and_is_open_to_its_user_alone"
    ),
    "**Messages.** Between processes travel JSON": (
        "test_security.py::test_processes_exchange_no_objects,"
        " test_security.py::test_names_in_a_message_reach_no_file_and_no_function"
    ),
    "A message that is not this library's ends the run": (
        "test_security.py::test_a_damaged_message_ends_the_run_and_hangs_nobody"
    ),
    "What it claims about sizes and places is checked": (
        "test_security.py::test_another_message_is_refused_with_words,"
        " test_fuzz.py::test_damaged_input_is_refused_or_equal"
    ),
    "Of the sender's open files it reaches those alone": (
        "test_security.py"
        "::test_a_message_reaches_no_file_but_the_memory_announced_for_its_connection"
    ),
    "**Links.** In a folder of checkpoints, a run or a report": (
        "test_disk.py::test_a_planted_link_is_not_followed_when_a_checkpoint_is_written,"
        " test_disk.py::test_a_checkpoint_behind_a_link_is_passed_over,"
        " test_disk.py::test_no_file_is_written_through_a_link"
    ),
    "**Damage.** Digests in manifests": (
        "test_fuzz.py::test_damaged_input_is_refused_or_equal,"
        " test_certificate.py::test_any_changed_file_is_found,"
        " test_certificate.py::test_a_changed_certificate_is_refused"
    ),
    "They are no signatures: who can write a file": (
        "test_security.py::test_a_digest_is_no_signature"
    ),
    "**Another run.** A folder is locked": (
        "test_lock.py::test_a_folder_that_another_process_holds_is_refused_until_it_ends"
    ),
    "It keeps runs of this library apart, and nobody else": (
        "test_lock.py::test_a_lock_that_was_taken_away_is_set_again"
    ),
    "**Stored runs and ledgers** are JSON": (
        "test_security.py::test_the_package_runs_no_text_and_loads_no_object,"
        " test_fuzz.py::test_a_damaged_run_is_refused_or_reported"
    ),
    "A report escapes all it shows": (
        "test_report.py::test_everything_shown_is_escaped,"
        " test_report.py::test_a_page_asks_for_nothing_outside_itself"
    ),
    "**Configurations** are TOML and literals": (
        "test_security.py::test_the_package_runs_no_text_and_loads_no_object,"
        " test_fuzz.py::test_any_configuration_file_is_read_or_refused"
    ),
    "**Downloaded data** is checked against": (
        "test_data.py::test_a_download_is_checked_kept_and_not_repeated"
    ),
    "The Python batches of CIFAR are pickles": (
        "test_data.py::test_a_pickle_that_would_run_code_is_refused_and_not_run"
    ),
    "**Weights** are written as safetensors": (
        "test_disk.py::test_weights_are_stored_as_every_reader_expects"
    ),
    "Where this project reads pickled ones": (
        "test_security.py::test_weights_are_loaded_as_weights_only"
    ),
    "Do the same with files that others give you.": (
        "test_security.py::test_pages_load_weights_as_weights_only"
    ),
    "`offbeat.launch` listens on loopback addresses alone": (
        "test_security.py::test_launch_listens_on_this_machine_alone"
    ),
    "Under `torchrun` the launcher decides": TORCH,
    "offbeat opens no port of its own.": "test_security.py::test_nothing_but_launch_opens_a_port",
    "`offbeat.launch` hands the function to its children": (
        "test_security.py::test_the_launcher_s_folder_is_open_to_its_user_alone"
    ),
    "Open an issue that says a report exists": YOURS,
}
"""Every sentence of SECURITY.md, by its beginning: the tests that hold it, or why there is none."""


def sentences_of(text: str) -> list[str]:
    """Of a page, headings left out."""
    found = []
    for block in re.split(r"\n\s*\n|^- ", re.sub(r"^#.*$", "", text, flags=re.M), flags=re.M):
        words = " ".join(block.split())
        found += re.split(r"(?<=[.:]) (?=[A-Z`*]|offbeat)", words) if words else []
    return found


def test_every_sentence_of_the_page_has_a_test() -> None:
    sentences = sentences_of((ROOT / "SECURITY.md").read_text())
    known = {begin: [s for s in sentences if s.startswith(begin)] for begin in PROMISES}
    assert {begin: len(found) for begin, found in known.items() if len(found) != 1} == {}
    told = {sentence for found in known.values() for sentence in found}
    assert [s for s in sentences if s not in told] == [], "say in PROMISES which test holds it"
    for tests in PROMISES.values():
        for test in [] if tests in (YOURS, TORCH) else tests.split(", "):
            file, name = test.split("::")
            assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text(), test


def test_a_new_sentence_would_be_seen() -> None:
    text = "# Title\n\n- **A.** One is so. Another is `so`.\n- B: no.\n\nThe last\nof all.\n"
    found = ["**A.** One is so.", "Another is `so`.", "B: no.", "The last of all."]
    assert sentences_of(text) == found


def test_files_are_as_private_as_the_user_has_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        disk.write(tmp_path / "file", "text")
        tensorfile.write(tmp_path / "tensors", {"x": torch.ones(2)})
        disk.Growing(tmp_path / "rows").close()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_shared_memory_has_no_name_and_is_open_to_its_user_alone() -> None:
    memory = Arena("secret")
    lot = memory.room_for(1 << 15)
    assert lot is not None
    assert os.readlink(f"/proc/self/fd/{lot[0]}") == "/memfd:offbeat-secret (deleted)"
    # Others come to it by /proc alone, which shows the files of a process to its user.
    assert Path("/proc/self/fd").stat().st_uid == os.getuid()
    assert Path("/proc/self/fd").stat().st_mode & 0o077 == 0


def test_a_digest_is_no_signature() -> None:
    value, _ = disk.unsealed(disk.sealed({"steps": 3}))
    forged, has_digest = disk.unsealed(disk.sealed({**value, "steps": 4}))
    assert (forged, has_digest) == ({"steps": 4}, True)
    with pytest.raises(ValueError, match="its digest differs"):
        disk.unsealed(disk.sealed({"steps": 3}).replace("3", "4", 1))


def test_nothing_but_launch_opens_a_port() -> None:
    opening = {"create_server", "bind", "listen", "socketpair"}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for function, call in calls(path):
            serves = is_set(call, "is_master") or function.split(".")[-1] in opening
            assert not serves or name == "engines/launcher.py", f"{name}: {function}"


def test_the_launcher_s_folder_is_open_to_its_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def start(*given: Any) -> None:
        (folder,) = (each for each in given if isinstance(each, Path))
        assert (folder / "call").exists()
        modes.append(folder.stat().st_mode & 0o777)
        raise KeyboardInterrupt

    monkeypatch.setattr("offbeat.engines.launcher._start", start)
    with pytest.raises(KeyboardInterrupt):
        offbeat.launch(jobs.listening_addresses, 1)
    assert modes == [0o700]
