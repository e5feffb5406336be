"""The storm's own parts: its plans, its wire, what it calls an adoption; a short storm."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.faults.storm import adoptions, disagreements, plans_of, summary
from benchmarks.faults.wire import Wire, Wired, ask
from torch._C._distributed_c10d import HashStore

from offbeat.transport.base import Key
from offbeat.transport.gloo import Gloo
from offbeat.transport.link import End
from offbeat.transport.wire import pack
from test_kills import environment

ROOT = Path(__file__).parents[1]


def options(**changes: Any) -> argparse.Namespace:
    given = {"replicas": 8, "seconds": 480.0, "rate": 125.0, "silence": 5.0, "pause": 0.05}
    return argparse.Namespace(**(given | {"seed": 1, "adoptions": 2} | changes))


def test_a_storm_is_a_function_of_its_seed() -> None:
    plans = plans_of(options())
    assert plans == plans_of(options())
    assert plans[1]["faults"] != plans_of(options(seed=2))[1]["faults"]
    stormy = [plan for plan in plans if plan["storm"] == "storm"]
    assert [plan["averaging"] for plan in stormy] == [
        *["dasgd"] * 3,
        "diloco",
        "streaming",
        "dasgd",
    ]
    assert stormy[-1]["stages"] == 2
    assert sum(plan["whole_at"] is not None for plan in stormy) == 1
    count = sum(len(plan["faults"]) for plan in stormy) / len(stormy)
    assert 8 < count < 19  # 125 an hour for 384 s are 13.3 on average
    assert {"donor killed", "donor frozen"} < {plan["storm"] for plan in plans}


def merged(rank: int, number: int, tracer: float, senders: list[int], life: int = 0) -> Any:
    row = {"what": "merged", "run": 0, "life": life, "rank": rank, "at": [0, number, 0]}
    return row | {"senders": senders, "tracer": tracer, "t": float(number)}


def test_first_weights_that_become_anybodys_state_are_seen() -> None:
    everyone = [0, 1]
    calm = [merged(rank, n, -0.2 * n, everyone) for n in range(1, 6) for rank in everyone]
    assert adoptions(calm) == disagreements(calm) == 0
    # The donor's state is lost, and both go on from the first weights.
    fallen = [*calm, *(merged(rank, 6, -0.002, everyone) for rank in everyone)]
    assert adoptions(fallen) == 2
    # One that comes back joins with them, while the other goes on.
    alone = [*calm, merged(0, 6, -1.2, everyone), merged(1, 6, -0.002, everyone, life=1)]
    assert adoptions(alone) == 1
    split = [*calm, merged(0, 6, -1.2, [0]), merged(1, 6, -1.2, [1])]
    assert disagreements(split) == 1


@pytest.fixture
def wire() -> Any:
    made = Wire()
    made.start()
    yield made
    made.stop()
    made.join()


def test_a_cut_wire_keeps_what_is_sent_until_it_is_mended(wire: Wire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = server.getsockname()[1]
        ask(wire.port, {"owns": target, "rank": 1})
        assert ask(wire.port, {"to": target, "rank": 0, "wired": [2]}) == target
        port = ask(wire.port, {"to": target, "rank": 0, "wired": [1], "beside": 40000})
        assert port != target
        near = socket.create_connection(("127.0.0.1", port))
        far, _ = server.accept()
    near.sendall(b"before")
    assert far.recv(100) == b"before"
    wire.cut({1})
    near.sendall(b"meanwhile")
    far.settimeout(0.3)
    with pytest.raises(TimeoutError):
        far.recv(100)
    wire.cut(set())
    far.settimeout(5)
    assert far.recv(100) == b"meanwhile"
    near.close()
    assert far.recv(100) == b""
    far.close()


def test_gloo_goes_over_the_wire(wire: Wire) -> None:
    store, links = HashStore(), {}

    def open_end(rank: int) -> None:
        end = End(rank == 0, Wired(store, wire.port, rank, [1]), None, torch.device("cpu"), 20.0)
        links[rank] = Gloo(end)

    threads = [threading.Thread(target=open_end, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parcel = pack(Key("weights", 0, 3), torch.arange(1000.0))
    sender = threading.Thread(target=links[0].send, args=(parcel,))
    sender.start()  # it ends when the other end receives
    arrival = links[1].receive()
    sender.join()
    assert torch.equal(arrival.message(), torch.arange(1000.0))
    deadline = time.monotonic() + 5
    while not any({0, 1} == ranks for ranks in wire.carried) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert wire.carried[frozenset({0, 1})] > 4000


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_short_storm_ends_well(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.faults.storm", "--replicas", "3"]
    command += ["--seconds", "60", "--rate", "400", "--part", "2/13", "--adoptions", "0"]
    environ = environment()
    environ["PYTHONPATH"] += f":{ROOT}"
    subprocess.run([*command, "--out", str(rows)], env=environ, cwd=ROOT, check=True, timeout=380)
    found = summary([json.loads(line) for line in rows.read_text().splitlines()])
    assert found["runs"] == 1
    for what in ("hung", "left", "adoptions", "disagreements", "lost"):
        assert found[what] == 0, found
