"""One stage per process: the bits of one process, and clear ends when something breaks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jobs
import offbeat
from helpers import assert_same_bits, trainer_for
from offbeat.engines import processes, world
from offbeat.engines.placement import Placement
from offbeat.engines.setup import describe
from offbeat.errors import BatchError, ConfigurationError, StageError, WorkerLost
from offbeat.faults import Faults
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    METHODS,
    Method,
    Phases,
    PipeDream,
    StaleWeights,
    Synchronous,
)
from offbeat.nest import tensors
from offbeat.transport import groups
from offbeat.transport.base import Key
from offbeat.transport.wire import Arrival, pack

ALL: list[Method] = [method() for method in METHODS]
HYBRID = Phases((StaleWeights(), 3), (Synchronous(), None))
Job = tuple[str, Method, int, str, dict[str, Any]]


def jobs_for(stages: int) -> list[Job]:
    """Every method on a BatchNorm and on a dropout model, optimizers in turn, and the extras."""
    optimizers = ["momentum", "adamw", "sgd"]
    found: list[Job] = []
    for place, method in enumerate(ALL):
        # DGL's own head reads images or vectors; both models give it one of them.
        found.append(("cnn", method, stages, optimizers[place % 3], {}))
        found.append(("dropout", method, stages, optimizers[(place + 1) % 3], {}))
    found.append(("cnn", HYBRID, stages, "momentum", {}))
    found.append(("cnn", Synchronous(), stages, "momentum", {"clip": 0.3}))
    found.append(("cnn", PipeDream(), stages, "adamw", {"clip": 0.3}))
    found.append(("dropout", StaleWeights(), stages, "sgd", {"autocast": torch.bfloat16}))
    uneven = Faults().slow(by=20.0, probability=0.3, seed=stages)
    slowed = (PipeDream(), StaleWeights(), DSP(hop=2), ADL(2))
    return found + [("cnn", method, stages, "momentum", {"faults": uneven}) for method in slowed]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stages", "processes"),
    [
        (3, 3),
        (3, 2),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
        pytest.param(4, 4, marks=pytest.mark.long),
    ],
)
def test_many_processes_give_the_bits_of_one(stages: int, processes: int) -> None:
    """Weights, losses, evaluations, lags, memory and cuts: on every rank what one process says."""
    todo = jobs_for(stages)
    by_rank = offbeat.launch(jobs.train_all, processes, todo, timeout_s=240)
    for place, job in enumerate(todo):
        settings = {name: value for name, value in job[4].items() if name != "faults"}
        alone = jobs.train(job[0], job[1], job[2], job[3], **settings)
        assert None not in alone["losses"][-3:]
        for rank in range(processes):
            ours = by_rank[rank][place]
            assert_same_bits(ours["state"], alone["state"])
            for name in ("losses", "evaluations", "lags", "ledger_losses", "cuts"):
                assert ours[name] == alone[name], (job[1], rank, name)
            declared = job[1].lags(stages)
            if not isinstance(job[1], Phases):
                assert tuple(max(lags.values()) for lags in ours["lags"]) <= declared


def test_a_different_process_layout_would_be_noticed() -> None:
    """The comparison above can fail: another seed changes the dropout model's weights."""
    one = jobs.train("dropout", StaleWeights(), 2)
    network, batches = jobs.job_of("dropout")
    other = trainer_for(network, StaleWeights(), stages=2, seed=4)
    for x, y in batches:
        other.step(x, y)
    other.flush()
    with pytest.raises(AssertionError):
        assert_same_bits(one["state"], other.state_dict())


# ------------------------------------------------------------------ the wire


@pytest.mark.parametrize(
    "message",
    [
        torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        (torch.arange(7), None, {"a": [torch.tensor(True), 2, "x", 0.1], 3: float("inf")}),
        [torch.empty(0, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.randn(70).double()],
        (),
        {"long": [torch.randn(2, 40) for _ in range(120)]},
    ],
)
def test_messages_arrive_as_they_left(message: Any) -> None:
    parcel = pack(Key("activation", 1, 5), message)
    arrival = Arrival(parcel.header)
    assert arrival.key == Key("activation", 1, 5)
    for buffer, body in zip(arrival.buffers, parcel.tensors, strict=True):
        buffer.copy_(body)
    found = arrival.message(torch.device("cpu"))
    ours, theirs = tensors(found), tensors(message)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    assert str(found) == str(message)


def test_gradient_flags_travel_and_holes_are_closed() -> None:
    tensor = torch.randn(4, 6)[:, ::2].requires_grad_()
    arrival = Arrival(pack(Key("activation", 1, 0), [tensor, torch.ones(40)]).header)
    found = arrival.message(torch.device("cpu"))
    assert found[0].requires_grad
    assert not found[1].requires_grad
    assert found[0].stride() == (3, 1)


def test_objects_do_not_travel() -> None:
    with pytest.raises(StageError, match="a object cannot travel between processes"):
        pack(Key("activation", 1, 0), {"thing": object()})


# ------------------------------------------------------------------ set-up


def test_disagreements_are_named_with_both_values() -> None:
    for what, words in {
        "method": r"the method differs.*StaleWeights.* on rank 0, .*PipeDream.* on rank 1",
        "model": "the model differs.*tensors, digest .* on rank 0.* on rank 1",
        "weights": "what weights the model starts from differs.*torch.manual_seed",
        "threads": "the number of threads differs between processes: 1 on rank 0, 2 on rank 1",
        "stages": "1 stage and the launcher started 2 processes.*--nproc-per-node 1",
        "loader": "the loader has 3 batches on rank 0 and 2 on rank 1",
    }.items():
        with pytest.raises((ConfigurationError, BatchError), match=words):
            offbeat.launch(jobs.disagree, 2, what, timeout_s=60)


def test_methods_are_described_alike_in_every_process() -> None:
    phases = Phases((DGL(head=lambda activation, output: None), 3), (DSP(hop=1), None))
    assert "0x" in str(phases)
    assert "0x" not in describe(phases)
    assert "DSP(backward=recompute, accumulate=1, cap=None, lag=None, hop=1)" in describe(phases)


def test_loaders_shuffled_differently_are_caught() -> None:
    with pytest.raises(BatchError, match="fed different batches .checksums"):
        offbeat.launch(jobs.shuffle_differently, 2, timeout_s=60)


def test_processes_must_have_been_started() -> None:
    with pytest.raises(ConfigurationError, match="needs several processes.*torchrun"):
        jobs.train("cnn", StaleWeights(), 2, engine="processes")
    with pytest.raises(ConfigurationError, match="Did you mean 'processes'"):
        jobs.train("cnn", StaleWeights(), 2, engine="process")


def test_serial_can_be_forced_inside_processes() -> None:
    found = offbeat.launch(jobs.train_serially, 2, timeout_s=60)
    alone = jobs.train("cnn", StaleWeights(), 3)
    for rank in range(2):
        assert_same_bits(found[rank]["state"], alone["state"])


# ------------------------------------------------------------------ which stages where


@pytest.mark.parametrize("placement", [None, (3, 1)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_stages_are_placed_by_their_cost_or_by_the_user(
    placement: tuple[int, int] | None, replicas: int, tmp_path: Path
) -> None:
    """Given cuts, so that the costs of stages differ: the first alone costs most."""
    counts = placement or (1, 3)
    found = offbeat.launch(
        jobs.train_placed, 2 * replicas, str(tmp_path / "many"), placement, replicas, timeout_s=100
    )
    _, _, alone = jobs.train_placed(str(tmp_path / "one"), None, replicas)
    for rank, (told, here, state) in enumerate(found):
        assert told == counts
        assert here == list(range(4))[: counts[0]] if rank % 2 == 0 else list(range(4))[counts[0] :]
        assert_same_bits(state, alone)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ((3, 5), r"placement=\(3, 5\) places 8 stages, and the model has 4.*add up to 4"),
        ((2, 1, 1), r"is for 3 in a row of .*, and here there are 2. Start 3 processes"),
        ((4,), r"is for 1 in a row of .*, and here there are 2. Start 1 processes"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(
    placement: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        offbeat.launch(jobs.train_placed, 2, str(tmp_path), placement, timeout_s=60)


def test_a_placement_is_numbers_of_stages_and_one_process_has_all() -> None:
    for wrong in (2, "22", (), (2, 0), (2.0, 2), [True, 3]):
        with pytest.raises(ConfigurationError, match=r"as in placement=\(3, 5\)"):
            offbeat.Machines(placement=wrong)  # type: ignore[arg-type]
    halves = offbeat.Machines(placement=(2, 2))
    for replicas in (1, 2):
        words = f"and here there are 1. Start {2 * replicas} processes"
        with pytest.raises(ConfigurationError, match=words):
            trainer_for(jobs.uneven_net(), cuts=[1, 2, 3], replicas=replicas, machines=halves)
    assert Placement.across(4, 2, 4, 0, halves.counts(4, 2, 2)).counts == (2, 2)
    with pytest.raises(ConfigurationError, match=r"machines=\(2, 2\): give an object"):
        trainer_for(jobs.uneven_net(), cuts=[1], machines=(2, 2))
    assert trainer_for(jobs.uneven_net(), cuts=[1, 2]).placement == (3,)


# ------------------------------------------------------------------ ends


def test_launch_returns_results_and_raises_the_first_error() -> None:
    assert offbeat.launch(jobs.ping, 2, 7) == [49, 49]
    with pytest.raises(ValueError, match="a planned mistake") as caught:
        offbeat.launch(jobs.raise_on, 2, 1, timeout_s=60)
    assert caught.value.__notes__ == ["offbeat: raised in rank 1 of launch()."]
    with pytest.raises(ConfigurationError, match="at least 1"):
        offbeat.launch(jobs.ping, 0, 7)


def test_launch_from_a_script(tmp_path: Path) -> None:
    """A function of the script itself: sent by name, without running the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, offbeat\n"
        "BACKEND = torch.backends.cudnn  # cannot be pickled\n"
        "def job(n):\n    return n + 1, BACKEND is not None\n"
        "if __name__ == '__main__':\n    print(offbeat.launch(job, 2, 4))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[(5, True), (5, True)]", done.stderr


def test_a_failing_worker_ends_all_and_shows_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a fault was planned at 1B2"):
        offbeat.launch(jobs.run_with, 3, Faults().fail("1B2"), timeout_s=60)
    assert time.monotonic() - start < 40


def test_a_failure_names_the_stage_of_several() -> None:
    with pytest.raises(RuntimeError, match="a fault was planned at 1B2"):
        offbeat.launch(jobs.run_with, 2, Faults().fail("1B2"), timeout_s=60)


def test_a_stall_says_who_waits_for_what() -> None:
    with pytest.raises(WorkerLost) as caught:
        offbeat.launch(jobs.run_with, 3, Faults().delay("1F3", 30.0), 3.0, timeout_s=60)
    words = str(caught.value)
    assert "no message for 3 s" in words or "another process waited too long" in words
    assert "rank 0: stage 0 waits for" in words
    assert "from stage 1" in words
    assert "rank 1: stage 1 waits for nothing" in words
    assert "rank 2: stage 2 waits for the activation of batch 3 for stage 2 from stage 1" in words


def test_a_value_that_never_comes_is_missed_with_words() -> None:
    words, _ = offbeat.launch(jobs.miss_an_exchange, 2, timeout_s=60)
    assert "rank 0 has waited 2 s (timeout=2) for 'lengths' from rank 1: " in words
    assert "give the trainer a longer timeout" in words


def test_a_stall_names_which_of_several_stages_waits() -> None:
    with pytest.raises(WorkerLost) as caught:
        offbeat.launch(jobs.run_with, 2, Faults().delay("2F3", 30.0), 3.0, timeout_s=60)
    words = str(caught.value)
    assert "rank 1: stage 2 waits for nothing" in words
    assert "rank 0: stage 1 waits for the gradient of batch 3 for stage 1 from stage 2" in words


@pytest.mark.parametrize(
    "action", ["0F2", *(pytest.param(a, marks=pytest.mark.long) for a in ("1B0", "2U3"))]
)
def test_a_killed_process_ends_the_others_with_words(action: str) -> None:
    with pytest.raises(WorkerLost, match=f"rank {action[0]} ended with signal SIGKILL"):
        offbeat.launch(jobs.run_with, 3, Faults().kill(action), timeout_s=60)


@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "verb",
    [
        *("save", "state_dict", "evaluate"),
        *(pytest.param(verb, marks=pytest.mark.long) for verb in ("drain", "ledger", "memory")),
    ],
)
def test_who_died_is_known_everywhere_within_two_seconds(
    verb: str, layout: tuple[int, int], tmp_path: Path
) -> None:
    """Also where those who wait share no stage with who died, and no average is due."""
    stages, replicas = layout
    last = stages * replicas - 1
    with pytest.raises(WorkerLost, match=f"rank {last} ended with signal SIGKILL"):
        offbeat.launch(
            jobs.lose_a_process_in, last + 1, verb, tmp_path, stages, replicas, timeout_s=60
        )
    died_s = float((tmp_path / "died").read_text())
    for rank in range(last):
        heard_s, words = (tmp_path / f"heard-{rank}").read_text().split(" ", 1)
        assert float(heard_s) - died_s < 2.0, (rank, words)
        assert words.startswith("WorkerLost: "), (rank, words)
        assert re.search(rf"rank {last}\b", words), (rank, words)


def alive_under(parent: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listing.stdout.split()]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """What a user writes: no init, no close, nothing about ranks but one line for printing."""
    file = tmp_path / "train.py"
    file.write_text(
        textwrap.dedent(
            """
            import sys, time
            import torch
            from torch import nn
            import offbeat

            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(),
                                  nn.Linear(12, 4))
            for method in ("pipedream", "stale-weights"):  # the first trainer is dropped unused
                trainer = offbeat.Trainer(
                    model, loss=nn.functional.cross_entropy, stages=3, timeout=30,
                    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), method=method,
                )
            steps, pause = int(sys.argv[2]), float(sys.argv[3])
            for n in range(steps):
                g = torch.Generator().manual_seed(n)
                loss = trainer.step(torch.randn(8, 6, generator=g),
                                    torch.randint(4, (8,), generator=g))
                time.sleep(pause)
                if n == 5:
                    print("under way", flush=True)
            trainer.flush()
            state = trainer.state_dict()
            if trainer.rank == 0:
                torch.save(state, sys.argv[1])
            """
        )
    )
    return file


def environment() -> dict[str, str]:
    source = str(Path(offbeat.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "ended_by", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_ctrl_c_ends_all_processes(script: Path, tmp_path: Path, ended_by: int) -> None:
    command = [*TORCHRUN, "3", str(script), str(tmp_path / "x.pt"), "100000", "0.01"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        assert "under way" in run.stdout.readline()
        workers = alive_under(run.pid)
        assert len(workers) == 3
        run.send_signal(ended_by)
        assert run.wait(timeout=60) != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("ends", ["board", "edges"])
def test_a_thread_that_has_not_ended_never_outlives_the_interpreter(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to a busy store once held one: the process aborted after all its work was done."""

    class Slow:
        failure = None

        def __init__(self, name: str) -> None:
            self.name = name

        def stop(self) -> None: ...

        def join(self) -> bool:
            return self.name != ends

        def close(self, wait_s: float = 0.0) -> bool:
            return self.name != ends

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(world, "OPEN", [(Slow("board"), Slow("edges"))])
    monkeypatch.setattr(world, "_end_at_once", end)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(SystemExit, match="0"):
        world._leave()


@pytest.mark.parametrize(("source", "whose"), [(0, "others to take its"), (1, "the .* of rank 1")])
def test_whoever_asks_alone_is_told_that_all_must_ask(
    source: int, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*_: Any) -> None:
        raise RuntimeError("Timed out waiting 8000ms for send operation to complete")

    monkeypatch.setattr(groups, "broadcast", time_out)
    monkeypatch.setattr(processes, "NOTICED_S", 0.0)
    alone: Any = SimpleNamespace(rank=0, _mailbox=SimpleNamespace(failure=None))
    words = f"rank 0 has waited .* for {whose}.*must be read by all: under 'if trainer.rank == 0'"
    with pytest.raises(WorkerLost, match=words):
        processes.Processes._broadcast(alone, [], None, [0, 1], source, "weights")
