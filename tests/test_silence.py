"""A process that is frozen or cut off says nothing, and is noticed by that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

import jobs
import offbeat
from helpers import assert_same_bits
from offbeat.elastic import restarts
from offbeat.elastic.restarts import Restarts
from offbeat.engines import launcher
from offbeat.engines.board import Board
from offbeat.errors import ConfigurationError, WorkerLost
from offbeat.transport import connect_two
from offbeat.transport.base import Key
from offbeat.transport.link import Connection
from offbeat.transport.pulse import Pulse
from test_kills import children_of, environment
from test_survivors import left_behind

SILENCE_S = 1.5


class Other:
    """Somebody who is heard, or has not been for some beats."""

    def __init__(self, rank: int, unheard: float = 0.0) -> None:
        self.rank, self.name, self.unheard = rank, f"rank {rank}", unheard
        self.error: WorkerLost | None = None

    def beat(self) -> None:
        self.unheard += 1

    def fall_silent(self, error: WorkerLost) -> None:
        self.error = error


def judged(*unheard: int) -> list[bool]:
    """Who is given up, at eight beats to a silence of 8 s."""
    others = [Other(rank, beats) for rank, beats in enumerate(unheard)]
    Pulse(8.0, list, lambda: "rank 9").judge(others)
    return [other.error is not None for other in others]


def test_who_is_silent_for_long_enough_is_given_up() -> None:
    assert judged(0, 7, 0) == [False, False, False]
    assert judged(0, 8, 3) == [False, True, False]
    assert judged(0, 8, 7) == [False, True, True]  # a network that broke is noticed at once


def test_the_smaller_part_of_a_network_waits_for_the_larger_one_to_speak() -> None:
    assert judged(9, 9, 9) == [False, False, False]
    assert judged(12, 12, 12) == [True, True, True]
    assert judged(9, 9, 0) == [True, True, False]  # two of four: equal parts


def test_a_process_that_was_frozen_itself_blames_nobody() -> None:
    """Its own beats are counted, not seconds."""
    script = textwrap.dedent(
        """
        import os, signal, time
        from offbeat.transport.pulse import Pulse
        from test_silence import Other

        other = Other(1)
        Pulse(1.0, lambda: [[other]], lambda: "rank 0").start()
        time.sleep(0.2)
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        print(other.unheard, other.error, flush=True)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "stops\n"
        time.sleep(1.5)
        run.send_signal(signal.SIGCONT)
        unheard, error = run.stdout.readline().split()
    assert error == "None"
    assert 0 < float(unheard) < 8


def test_what_says_so_names_who_where_and_since_when() -> None:
    other = Other(3, unheard=8)
    Pulse(8.0, list, lambda: "rank 0 (stage 0 waits for nothing)").judge([other])
    words = str(other.error)
    assert "rank 0 (stage 0 waits for nothing) has heard nothing from rank 3 for 8.0 s" in words
    assert "(silence=8)" in words
    assert other.error is not None
    assert other.error.rank == 3


@pytest.mark.parametrize("silence", [0.0, 0.5, -1, float("nan"), float("inf"), "30", True, None])
def test_silence_is_a_number_of_seconds(silence: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"silence=.*1 or more"):
        offbeat.Machines(silence=silence)


# ------------------------------------------------------------------------- connections


def test_a_connection_that_is_broken_off_ends_what_waits_in_it() -> None:
    """A frozen process accepts nothing: whoever sends to it would wait for good."""
    store, ends = HashStore(), {}

    def open_end(first: bool) -> None:
        ends[first] = connect_two(store, 20.0, "the other", first=first)

    threads = [threading.Thread(target=open_end, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors: list[Exception] = []
    connection = Connection(ends[True], 1, lambda _: None, errors.append)
    connection.start()
    connection.put(Key("weights", 0, 0), torch.zeros(50_000_000))  # more than any socket holds
    time.sleep(0.2)
    assert all(thread.is_alive() for thread in connection.threads)
    connection.fall_silent(WorkerLost("silent"))
    for thread in connection.threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [str(error) for error in errors] == ["silent"]


def test_a_large_message_shows_that_its_sender_lives_piece_by_piece() -> None:
    store, ends = HashStore(), {}

    def open_end(first: bool) -> None:
        ends[first] = connect_two(store, 20.0, "the other", first=first)

    threads = [threading.Thread(target=open_end, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived: list[Any] = []
    receiver = Connection(ends[False], 0, lambda arrival: arrived.append(arrival.message()), print)
    sender = Connection(ends[True], 1, lambda _: None, print)
    receiver.start()
    sender.start()
    sent = torch.arange(5_000_000, dtype=torch.float32)
    before = ends[False].incoming.received
    sender.put(Key("weights", 0, 0), sent)
    deadline = time.monotonic() + 30
    while not arrived and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(arrived[0], sent)
    assert ends[False].incoming.received >= before + 5
    for one in (sender, receiver):
        one.say_goodbye()


# ------------------------------------------------------------------------- the launcher's store


class Frozen(HashStore):
    """Never answers."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(60)
        return False


def test_a_request_to_a_frozen_store_is_bounded() -> None:
    board = Board.__new__(Board)
    board._store, board._timeout_s, board._edges = Frozen(), 0.3, None  # type: ignore[assignment]
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"the launcher's store does not answer.*frozen"):
        board.is_dead(1)
    assert time.monotonic() - began < 5


def test_of_two_that_have_lost_each_other_one_goes_on() -> None:
    store: Any = HashStore()
    boards = []
    for rank in range(3):
        board = Board.__new__(Board)
        board._store, board._rank, board._own, board._edges = store, rank, rank, None
        boards.append(board)
    assert boards[0].declare_dead(1)
    assert not boards[1].declare_dead(0)
    assert not boards[1].declare_dead(2)
    assert boards[2].declare_dead(1)
    assert json.loads(store.get("deaths")) == [1]
    assert [bool(store.check([f"dead/{life}"])) for life in range(3)] == [False, True, False]


def states_of(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]


@pytest.mark.timeout(120)
def test_a_frozen_process_that_holds_the_store_is_not_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import jobs
            import offbeat

            if __name__ == "__main__":
                offbeat.launch(jobs.train_for_good, 2, {SILENCE_S})
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert "training" in run.stdout.readline()
        pids = [*children_of(run.pid).values()]
        os.kill(run.pid, signal.SIGSTOP)
        began = time.monotonic()
        while states_of(pids) != ["Z", "Z"] and time.monotonic() < began + 40:
            time.sleep(0.05)
        waited_s = time.monotonic() - began
        os.kill(run.pid, signal.SIGCONT)
        _, errors = run.communicate(timeout=60)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert waited_s < 12, waited_s
    assert "WorkerLost: the launcher's store does not answer" in errors


# ------------------------------------------------------------------------- whole runs


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_frozen_stage_ends_the_run_in_words() -> None:
    began = time.monotonic()
    words = r"has heard nothing from rank 1 for .*silence=1.5.*frozen"
    with pytest.raises(WorkerLost, match=words):
        offbeat.launch(jobs.freeze, 2, 1, 1, SILENCE_S, timeout_s=60)
    assert time.monotonic() - began < 40
    assert left_behind() == []


@pytest.mark.timeout(200)
def test_a_frozen_replica_is_replaced() -> None:
    found = offbeat.launch(jobs.freeze, 3, 1, 3, SILENCE_S, timeout_s=150, go_on=True, restart=1)
    assert left_behind() == []
    assert None not in found
    for result in found:
        assert_same_bits(result["state"], found[0]["state"])
    gone = [words for _, words in found[0]["said"] if "is gone" in words]
    assert len(gone) == 1
    assert "replica 1 is gone (rank 0 (" in gone[0]
    assert "has heard nothing from rank 1" in gone[0]


class Child:
    """A process of a launcher, which runs until it is killed."""

    stdin = None

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


def looked_after(monkeypatch: pytest.MonkeyPatch) -> tuple[Restarts, list[Child], Store]:
    """Two replicas of one process each, of which number 1 has died and is started again."""
    store, clock = HashStore(), [100.0]

    def tick() -> float:
        clock[0] += 0.3
        return clock[0]

    monkeypatch.setattr(restarts, "time", SimpleNamespace(monotonic=tick))
    children = [Child(), Child()]

    def start(rank: int, more: dict[str, str]) -> Child:
        return Child()

    looks: Any = Restarts
    made = looks(children, start, store, 1)
    notes = restarts.returns_of(store)
    notes.set("silence", "5")
    notes.set("row", "1")
    children[1].kill()
    made.look()
    made.look()
    assert children[1].code is None
    return made, children, notes


def test_one_that_is_frozen_on_its_way_back_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, children, notes = looked_after(monkeypatch)
    for beat in range(60):  # a slow start, with signs of life
        notes.set("1/alive/0", str(beat))
        made.look()
        assert children[1].code is None
    for _ in range(60):
        made.look()
    assert children[1].code == -9
    assert json.loads(notes.get("1/note")) == "void"


def test_what_the_others_have_given_up_and_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, children, notes = looked_after(monkeypatch)
    notes.set("1/joined/0", "yes")
    for _ in range(60):
        made.look()
    notes.set(restarts.lost_note(1), "yes")  # its former life
    for _ in range(60):
        made.look()
    assert [child.code for child in children] == [None, None]
    notes.set(restarts.lost_note(1 + 2), "yes")
    for _ in range(60):
        made.look()
    assert [child.code for child in children] == [None, -9]


def test_who_is_silent_from_the_beginning_is_missed_too() -> None:
    """A process may freeze after it has met the others and before it has sent anything."""
    store, ends = HashStore(), {}

    def open_end(first: bool) -> None:
        ends[first] = connect_two(store, 20.0, "the other", first=first)

    threads = [threading.Thread(target=open_end, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors: list[Exception] = []
    connection = Connection(ends[True], 1, lambda _: None, errors.append)
    connection.start()
    pulse = Pulse(1.0, lambda: [[connection]], lambda: "rank 0")
    began = time.monotonic()
    pulse.start()
    while not errors and time.monotonic() < began + 20:
        time.sleep(0.05)
    pulse.stop()
    assert "rank 0 has heard nothing from rank 1" in str(errors[0])


@pytest.mark.timeout(150)
def test_who_dies_before_all_have_met_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can go on without it yet, and meeting has no end of its own."""
    start = launcher._start

    def start_and_kill(
        size: int, port: int, threads: int, folder: Path, rank: int, more: Any
    ) -> Any:
        child = start(size, port, threads, folder, rank, more)
        if rank == 1:
            child.kill()
        return child

    monkeypatch.setattr(launcher, "_start", start_and_kill)
    with pytest.raises(WorkerLost, match="rank 1 ended with signal SIGKILL"):
        offbeat.launch(jobs.end_early, 2, timeout_s=100, go_on=True)
    assert left_behind() == []
