"""What processes run in tests: importable functions, one call per process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import offbeat
from helpers import OPTIMIZERS, Batch, cnn, image_batches, trainer_for, vector_batches
from offbeat import transport
from offbeat.averaging import AllReduce, Averaging, DaSGD, LocalSGD
from offbeat.checkpoints import tensorfile
from offbeat.corrections import Monitor
from offbeat.engines.processes import Processes
from offbeat.methods import GPipe, Method, StaleWeights
from offbeat.records.ledger import Entry
from offbeat.transport.link import Link


def dropout_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 12), nn.Dropout(0.3), nn.LayerNorm(12), nn.Linear(12, 12), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4),
    )  # fmt: skip


def tied_net() -> nn.Sequential:
    """One weight in four places, two of them in a row, and a bias in three."""
    torch.manual_seed(3)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    ties = [nn.Linear(6, 6) for _ in range(3)]
    for tie in ties:
        tie.weight = first.weight
    ties[2].bias = last.bias = ties[1].bias
    return nn.Sequential(
        first, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), ties[0], ties[1], nn.Tanh(), last, nn.ReLU(),
        ties[2],
    )  # fmt: skip


def job_of(model: str) -> tuple[nn.Sequential, list[Batch]]:
    if model == "cnn":
        return cnn(), image_batches(7, rows=8, last_rows=5)
    return dropout_net(), vector_batches(7, rows=8, dtype=torch.float32)


def train(
    model: str, method: Method, stages: int, optimizer: str = "momentum", **settings: Any
) -> dict[str, Any]:
    """Trains, evaluates in the middle and at the end; returns everything a user could look at."""
    network, batches = job_of(model)
    trainer = trainer_for(network, method, OPTIMIZERS[optimizer], stages=stages, seed=3, **settings)
    losses: list[float | None] = []
    middle = None
    for n, (x, y) in enumerate(trainer.batches(batches)):
        loss = trainer.step(x, y)
        losses.append(None if loss is None else float(loss))
        if n == 3:
            middle = trainer.evaluate(trainer.batches(batches))
    losses += [float(loss) for loss in trainer.flush()]
    end = trainer.evaluate(batches)
    ledger = trainer.ledger
    return {
        "state": trainer.state_dict(),
        "losses": losses,
        "evaluations": (middle, end),
        "lags": [ledger.lags(stage) for stage in range(stages)],
        "ledger_losses": ledger.losses(stages - 1),
        "memory": trainer.memory(),
        "cuts": trainer.cuts,
    }


def train_all(jobs: list[tuple[str, Method, int, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several trainers one after the other in the same processes."""
    return [
        train(model, method, stages, optimizer, **settings)
        for model, method, stages, optimizer, settings in jobs
    ]


def train_replicas(
    model: str, method: Method, averaging: Averaging, replicas: int, stages: int, **settings: Any
) -> dict[str, Any]:
    """As :func:`train`, with replicas: everything that is the same in any layout."""
    network, batches = job_of(model)
    trainer = trainer_for(
        network,
        method,
        OPTIMIZERS["momentum"],
        stages=stages,
        replicas=replicas,
        averaging=averaging,
        seed=3,
        **settings,
    )
    whole = [(x, y) for x, y in batches if len(x) % replicas == 0]
    for x, y in trainer.batches(whole * 2):
        trainer.step(x, y)
    found = {
        "before": trainer.state_dict(),
        "evaluations": [trainer.evaluate(whole), trainer.evaluate(whole, of="replica")],
    }
    trainer.flush()
    ledger = trainer.ledger
    pairs = [(r, k) for r in range(replicas) for k in range(stages)]
    found["after"] = trainer.state_dict()
    found["lags"] = [ledger.lags(k, r) for r, k in pairs]
    found["losses"] = [ledger.losses(stages - 1, r) for r in range(replicas)]
    found["merges"] = [
        [(e.batch, e.version) for e in ledger if (e.kind, e.replica, e.stage) == ("M", r, k)]
        for r, k in pairs
    ]
    return found


def train_all_replicas(
    jobs: list[tuple[str, Method, Averaging, int, int, dict[str, Any]]],
) -> list[dict[str, Any]]:
    return [
        train_replicas(model, method, averaging, replicas, stages, **settings)
        for model, method, averaging, replicas, stages, settings in jobs
    ]


def train_with_ddp() -> dict[str, Any]:
    """The data of :func:`train_replicas` under DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    network, batches = job_of("cnn")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for x, y in [(x, y) for x, y in batches if len(x) % size == 0] * 2:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
        optimizer.step()
    return network.state_dict()


def look_at_mesh() -> tuple[Any, ...]:
    network, _ = job_of("cnn")
    trainer = trainer_for(network, cuts=[4], replicas=2)
    mesh = trainer.mesh
    assert mesh is not None
    return mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate(), mesh["stage"].size()


def read_by_sampler() -> dict[str, Any]:
    """Trains with a loader that reads only this process's rows."""
    from torch.utils.data import DataLoader, TensorDataset

    network, batches = job_of("cnn")
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    trainer = trainer_for(network, StaleWeights(), cuts=[4], replicas=2, averaging=DaSGD(2, 1))
    sampler = trainer.sampler(len(x), 8, seed=5, drop_last=True)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler)
    for _ in range(2):
        for xs, ys in trainer.batches(loader):
            trainer.step(xs, ys)
    return trainer.state_dict()


def feed_everyone_alike() -> None:
    network, batches = job_of("cnn")
    trainer = trainer_for(network, replicas=2, averaging=DaSGD(2, 1))
    trainer.step(*batches[0])


def lose_a_replica() -> None:
    """Replica 1 ends without a word in the middle of a run."""
    import os

    network, batches = job_of("cnn")
    trainer = trainer_for(network, replicas=2, averaging=DaSGD(2, 1), timeout=60.0)
    for n, (x, y) in enumerate(trainer.batches(batches[:-1] * 50)):
        if n == 5 and os.environ["RANK"] == "1":
            os._exit(7)
        trainer.step(x, y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor]:
        update = torch.tanh(self.linear(self.norm(hidden)))
        return (hidden + (update if mask is None else update * mask),)


class Tower(nn.Module):
    """Prefix, blocks, suffix in one forward; blocks return tuples and take a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.end = nn.BatchNorm1d(6)
        self.outlet = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > -1.0).float()
        hidden = self.norm(self.inlet(x))
        for block in self.blocks:
            (hidden,) = block(hidden, mask)
        logits: Tensor = self.outlet(self.end(hidden))
        return logits


class HandCut:
    """The same tower as three stages, cut before blocks 1 and 3 by hand."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower

    def stages(self) -> list[nn.Module]:
        tower = self._tower

        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inlet, self.norm, self.block = tower.inlet, tower.norm, tower.blocks[0]

            def forward(self, x: Tensor) -> Any:
                mask = (x > -1.0).float()
                return self.block(self.norm(self.inlet(x)), mask)[0], mask

        class Second(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = tower.blocks[1:3]

            def forward(self, given: Any) -> Any:
                hidden, mask = given
                for block in self.blocks:
                    (hidden,) = block(hidden, mask)
                return hidden, mask

        class Third(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block, self.end, self.outlet = tower.blocks[3], tower.end, tower.outlet

            def forward(self, given: Any) -> Any:
                return self.outlet(self.end(self.block(*given)[0]))

        return [First(), Second(), Third()]


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


def tower_batches() -> list[Batch]:
    return vector_batches(7, rows=8, dtype=torch.float32)


def ping(value: int) -> int:
    return value * value


def raise_on(rank: int) -> None:
    import os

    if int(os.environ["RANK"]) == rank:
        raise ValueError("a planned mistake")
    x, y = vector_batches(1, dtype=torch.float32)[0]
    trainer = trainer_for(dropout_net(), offbeat.StaleWeights(), stages=2)
    for _ in range(10):
        trainer.step(x, y)


def disagree(what: str) -> None:
    """Sets rank 1 up differently in one respect."""
    import os

    other = os.environ["RANK"] == "1"
    network, batches = job_of("cnn")
    method: Method = offbeat.StaleWeights()
    stages = 2
    if what == "method" and other:
        method = offbeat.PipeDream()
    if what == "model" and other:
        network = network.append(nn.Identity()).append(nn.Linear(5, 5))
    if what == "weights" and other:
        network = cnn(seed=5)
    if what == "threads" and other:
        torch.set_num_threads(2)
    if what == "stages":
        stages = 1
    trainer = trainer_for(network, method, stages=stages)
    for x, y in trainer.batches(batches[: 2 if what == "loader" and other else 3]):
        trainer.step(x, y)


def shuffle_differently() -> None:
    import os

    network, batches = job_of("cnn")
    if os.environ["RANK"] == "1":
        batches = batches[::-1]
    trainer = trainer_for(network, offbeat.StaleWeights(), stages=2)
    for x, y in batches:
        trainer.step(x, y)


def train_serially() -> dict[str, Any]:
    return train("cnn", offbeat.StaleWeights(), 3, engine="serial")


def run_with(faults: offbeat.Faults, timeout: float = 30.0) -> None:
    network, batches = job_of("cnn")
    trainer = trainer_for(network, offbeat.StaleWeights(), stages=3, faults=faults, timeout=timeout)
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()


def watch(stages: int) -> dict[str, Any]:
    """Trains with a monitor and probes in the middle; what was read."""
    network, batches = job_of("dropout")
    trainer = trainer_for(
        network, StaleWeights(), stages=stages, seed=3, corrections=["predict"],
        monitor=Monitor(every=2, probe=True),
    )  # fmt: skip
    probes = []
    for n, (x, y) in enumerate(trainer.batches(batches * 2)):
        trainer.step(x, y)
        if n in (6, 9):
            probes.append(trainer.probe(x, y))
    trainer.flush()
    return {"probes": probes, "readings": sorted(map(tuple, trainer.readings))}


def train_guarded(
    todo: Sequence[tuple[Method, offbeat.Guards]], stages: int = 2
) -> list[tuple[dict[str, Any], Any]]:
    """Trains on data with a nan in batch 4; returns the weights and what the guards saw."""
    found = []
    for method, guards in todo:
        network, batches = job_of("cnn")
        batches = [(x.clone(), y) for x, y in batches]
        batches[4][0][0, 0, 0, 0] = float("nan")
        trainer = trainer_for(network, method, stages=stages, guards=guards)
        for x, y in trainer.batches(batches * 2):
            trainer.step(x, y)
        trainer.flush()
        updates = sorted((*r[:3], repr(r.norm), *r[4:]) for r in trainer.updates)
        found.append((trainer.state_dict(), updates))
    return found


def train_without_pickle() -> bool:
    """Trains and asks for everything, while nothing can be unpickled."""
    import pickle
    from unittest import mock

    import torch.distributed.distributed_c10d as c10d

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is unpickled")

    with (
        mock.patch.object(pickle, "loads", refuse),
        mock.patch.object(pickle, "load", refuse),
        mock.patch.object(c10d, "_unpickler", refuse),
    ):
        network, batches = job_of("cnn")
        guards = offbeat.Guards(nonfinite="skip")
        trainer = trainer_for(
            network, StaleWeights(), stages=2, replicas=2, averaging=DaSGD(2, 1), guards=guards
        )
        for x, y in trainer.batches(batches[:-1]):
            trainer.step(x, y)
        trainer.evaluate(batches[:-1])
        trainer.flush()
        assert trainer.mesh is not None
        return bool(trainer.state_dict() and trainer.memory() and trainer.ledger.losses(1))


def listening_addresses() -> list[str]:
    """The local addresses, in hexadecimal, on which this process and its parent listen."""
    import os
    from pathlib import Path

    network, batches = job_of("cnn")
    trainer = trainer_for(network, stages=2)
    trainer.step(*batches[0])
    sockets = {
        os.readlink(file).removeprefix("socket:[").rstrip("]")
        for pid in (os.getpid(), os.getppid())
        for file in Path(f"/proc/{pid}/fd").iterdir()
        if file.is_symlink()
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]


def send_a_damaged_message() -> None:
    import os
    from unittest import mock

    from offbeat.transport import link
    from offbeat.transport.wire import Parcel

    network, batches = job_of("cnn")
    trainer = trainer_for(network, stages=2, timeout=50.0)
    trainer.step(*batches[0])
    damage = mock.patch.object(link, "pack", return_value=Parcel(b'{"key": 1}', []))
    if os.environ["RANK"] == "0":
        damage.start()
    trainer.step(*batches[1])


def train_over(kinds: Sequence[type[Link]]) -> list[dict[str, Any]]:
    """One run over each kind of link, which is then the only one there is."""
    found = []
    for kind in kinds:
        transport.LINKS = (kind,)
        found.append(train("cnn", StaleWeights(), 2))
    return found


def lose_the_other(kind: type[Link]) -> None:
    """The second of two processes dies while the first waits for its gradients."""
    import os
    import signal

    transport.LINKS = (kind,)
    network, batches = job_of("cnn")
    trainer = trainer_for(network, stages=2, timeout=50.0)
    trainer.step(*batches[0])
    if trainer.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for batch in batches[1:]:
        trainer.step(*batch)
    trainer.flush()


def outlive(
    averaging: Averaging, replicas: int, stages: int, dies: int, at: int, delay_s: float | None
) -> dict[str, Any]:
    """Trains until the end without the process that kills itself in step ``at``.

    ``delay_s``: None dies before the step, when all that it has to send is sent; otherwise so many
    seconds after the step's beginning; -1 raises an error in place of it.
    """
    import logging
    import os
    import signal
    import threading
    import time

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    network, batches = dropout_net(), vector_batches(12, rows=12, dtype=torch.float32)
    trainer = trainer_for(
        network,
        StaleWeights() if stages > 1 else offbeat.Synchronous(),
        OPTIMIZERS["momentum"],
        stages=stages,
        replicas=replicas,
        averaging=averaging,
        seed=3,
        timeout=60.0,
        when_replica_dies="go on",
    )

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for number, (x, y) in enumerate(trainer.batches(batches)):
        if trainer.rank == dies and number == at:
            if delay_s == -1:
                raise ValueError("a planned mistake")
            if delay_s is None:
                time.sleep(1.0)
                die()
            threading.Timer(delay_s or 0.0, die).start()
        if delay_s == -1:
            time.sleep(0.3)  # so that a note about the error would be read in time
        trainer.step(x, y)
    evaluation = trainer.evaluate(batches)
    trainer.flush()
    assert len(trainer.memory()) == stages
    (replica,) = trainer._engine.placement.replicas_here
    assert len(trainer.ledger.losses(stages - 1, replica)) == 12
    return {"state": trainer.state_dict(), "evaluation": evaluation, "said": said}


def come_back(
    averaging: Averaging, replicas: int, stages: int, row: int, stumbles: bool
) -> dict[str, Any]:
    """Trains on while the last process of replica 1 kills itself in step 5, comes back and joins.

    The others wait until it is back. ``row``: how many processes hold a replica. ``stumbles``: its
    first return dies on the way.
    """
    import logging
    import os
    import signal
    import threading
    import time

    from offbeat.elastic.restarts import return_number
    from offbeat.engines.feed import checksum_of

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    batches = vector_batches(12, rows=12, dtype=torch.float32)
    trainer = trainer_for(
        dropout_net(),
        StaleWeights() if stages > 1 else offbeat.Synchronous(),
        OPTIMIZERS["momentum"],
        stages=stages,
        replicas=replicas,
        averaging=averaging,
        seed=3,
        timeout=120.0,
        when_replica_dies="go on",
    )

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_return() -> None:
        """However long it takes; from the promise on, steps are what it takes."""
        assert isinstance(trainer._engine, Processes)
        assert trainer._engine.membership is not None
        door = trainer._engine.membership.door
        while door is not None and door._promised is None and door._admission is None:
            away = sum(("is gone" in words) - ("is back" in words) for words in said)
            if away <= 0:
                break
            time.sleep(0.02)

    mortal = trainer.rank == 2 * row - 1
    if mortal and stumbles and return_number() == 1:
        threading.Timer(0.2, die).start()  # the others are about to let it in
    refusals = []
    if trainer.behind:
        refusals.append(refusal(lambda: trainer.evaluate(batches)))
    weights: dict[int, int] = {}
    """Digests of this stage's weights by their version."""
    steps = []
    evaluations = []
    for _ in range(EPOCHS):
        for x, y in trainer.batches(batches):
            step = trainer._pipeline.position.step
            if mortal and not return_number() and step == 5:
                time.sleep(0.5)  # all that it has to send is sent
                die()
            trainer.step(x, y)
            steps.append(step)
            here = [worker.stage for worker in trainer._engine.workers]
            weights[here[0].version] = checksum_of([list(stage.parameters) for stage in here])
            wait_for_return()
        if not trainer.behind:
            evaluations.append(trainer.evaluate(batches))
    trainer.flush()
    merged = [entry.version for entry in trainer.own_ledger if entry.kind == "M"]
    return {
        "state": trainer.state_dict(),
        "evaluation": evaluations[-1],
        "merged": {version: weights[version] for version in merged if version in weights},
        "steps": steps,
        "said": said,
        "refusals": refusals,
    }


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except offbeat.OffbeatError as error:
        return str(error)
    return "nothing was refused"


EPOCHS = 4
"""Of :func:`come_back`, of 12 batches each."""


def end_early() -> int:
    """Replica 1 dies, and the other one is done before it can come back."""
    import os
    import signal

    batches = vector_batches(4, rows=12, dtype=torch.float32)
    trainer = trainer_for(
        dropout_net(), replicas=2, averaging=DaSGD(2, 1), seed=3, when_replica_dies="go on"
    )
    for number, (x, y) in enumerate(trainer.batches(batches)):
        if trainer.rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step(x, y)
    trainer.flush()
    return trainer.rank


def save_without(dies: int, folder: str) -> dict[str, Any] | None:
    """Three replicas of which one dies; the others save before and afterwards, and train on."""
    import os
    import signal
    import time
    from pathlib import Path

    place = Path(folder)
    batches = vector_batches(12, rows=12, dtype=torch.float32)
    trainer = trainer_for(
        dropout_net(), optimizer=OPTIMIZERS["momentum"], replicas=3, averaging=DaSGD(2, 1), seed=3,
        when_replica_dies="go on",
    )  # fmt: skip
    losses = []
    for number, (x, y) in enumerate(trainer.batches(batches)):
        if number == 4:
            trainer.save(place / "before", wait=True)
        if trainer.rank == dies and number == 5:
            time.sleep(0.5)  # all that it has to send is sent
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(trainer.step(x, y))
        if number == 7:
            started = time.monotonic()
            trainer.save(place / "exact", wait=True)
            saved_s = time.monotonic() - started
            trainer.save(place / "drained", drain=True, wait=True)
            saved = trainer.state_dict()
    return {"saved_s": saved_s, "saved": saved, "losses": len(losses)}


def save_often(dies: int, at: int, delay_s: float, folder: str) -> dict[str, Any]:
    """Three replicas that save after every other step, by turns exactly and drained; one dies."""
    import os
    import signal
    import threading
    import time

    batches = vector_batches(40, rows=12, dtype=torch.float32)
    trainer = trainer_for(
        dropout_net(), optimizer=OPTIMIZERS["momentum"], replicas=3, averaging=DaSGD(2, 1), seed=3,
        timeout=60.0, when_replica_dies="go on",
    )  # fmt: skip
    refusals = []
    slowest_s = 0.0
    for number, (x, y) in enumerate(trainer.batches(batches)):
        if (trainer.rank, number) == (dies, at):
            threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        trainer.step(x, y)
        started = time.monotonic()
        if number % 2:
            words = refusal(lambda n=number: trainer.save(folder, drain=n % 4 == 1))  # type: ignore[misc]
            refusals += [words] if words != "nothing was refused" else []
        slowest_s = max(slowest_s, time.monotonic() - started)
    trainer.flush()
    trainer.save(folder, drain=True, wait=True)
    return {"state": trainer.state_dict(), "refusals": refusals, "slowest_s": slowest_s}


def miss_an_exchange() -> str | None:
    """Rank 1 does something else while rank 0 compares the lengths of the loaders."""
    import time

    trainer = trainer_for(
        job_of("cnn")[0], StaleWeights(), OPTIMIZERS["momentum"], stages=2, timeout=2.0
    )
    if trainer.rank == 1:
        time.sleep(6)
        return None
    return refusal(lambda: list(trainer.batches([])))


def disagree_about_death() -> None:
    import os

    network, _ = job_of("cnn")
    when = "go on" if os.environ["RANK"] == "0" else "stop"
    trainer_for(network, replicas=2, averaging=DaSGD(2, 1), when_replica_dies=when)


def pause(folder: str) -> tuple[list[Entry], list[Entry]]:
    """The ledgers of a run that is saved, and of the one that goes on as if 1000 s later."""
    network, batches = job_of("dropout")
    first, again = (trainer_for(network, StaleWeights(), stages=2, seed=3) for _ in range(2))
    for x, y in first.batches(batches[:4]):
        first.step(x, y)
    first.save(folder, wait=True)
    before = list(first.ledger)
    read = tensorfile.read

    def read_late(path: Path) -> Any:
        time.sleep(0.5 * again.rank)  # not all are ready at once
        return read(path)

    later = SimpleNamespace(time=lambda: time.time() + 1000, perf_counter=time.perf_counter)
    with (
        patch("offbeat.checkpoints.exact.time", later),
        patch.object(tensorfile, "read", read_late),
    ):
        again.resume(folder)
    for x, y in again.batches(batches[4:]):
        again.step(x, y)
    return before, list(again.ledger)


def lose_a_process_in(verb: str, folder: Path, stages: int, replicas: int) -> None:
    """The last process dies while the others are in a verb; they write what they heard, and when.

    No average is ever due, so that replicas have nothing else by which to notice.
    """
    import os
    import signal
    import time

    network, batches = dropout_net(), vector_batches(4, rows=8, dtype=torch.float32)
    trainer = trainer_for(
        network,
        StaleWeights() if stages > 1 else offbeat.Synchronous(),
        stages=stages,
        replicas=replicas,
        averaging=LocalSGD(1_000_000) if replicas > 1 else None,
        timeout=60.0,
    )
    for x, y in trainer.batches(batches):
        trainer.step(x, y)
    trainer.memory()  # all are here
    if trainer.rank == stages * replicas - 1:
        time.sleep(0.5)
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    verbs: dict[str, Callable[[], object]] = {
        "save": lambda: trainer.save(folder / "exact"),
        "drain": lambda: trainer.save(folder / "drained", drain=True),
        "state_dict": trainer.state_dict,
        "evaluate": lambda: trainer.evaluate(batches),
        "ledger": lambda: trainer.ledger,
        "memory": trainer.memory,
    }
    try:
        verbs[verb]()
        time.sleep(3.0)
        trainer.flush()
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        words = f"{time.time()} {type(error).__name__}: {error}\n{notes}"
        (folder / f"heard-{trainer.rank}").write_text(words)
        raise


def token_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 9)
    ).double()


def padded_batches(count: int, words: int = 9) -> list[Batch]:
    """Rows of 1 to 7 tokens, the labels behind them -100; short rows first."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(count):
        ids = torch.randint(words, (8, 7), generator=generator)
        lengths = torch.randint(1, 8, (8,), generator=generator).sort().values
        labels = ids.roll(1).where(torch.arange(7) < lengths[:, None], torch.tensor(-100))
        batches.append((ids, labels))
    return batches


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def counted_tokens(_x: Any, y: Tensor) -> Tensor:
    return (y != -100).sum()


def weighted_trainer(
    method: Method, optimizer: str = "momentum", **settings: Any
) -> offbeat.Trainer:
    given: dict[str, Any] = {"cuts": [3], "loss": token_loss, "weight": counted_tokens, "seed": 3}
    return trainer_for(token_net(), method, OPTIMIZERS[optimizer], **given | settings)


def train_weighted(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trains on padded batches with an empty part among them, one trainer after the other."""
    found = []
    batches = padded_batches(6)
    batches[3][1][:2] = -100
    for settings in jobs:
        trainer = weighted_trainer(**settings)
        losses = [trainer.step(x, y) for x, y in trainer.batches(batches)]
        losses += trainer.flush()
        evaluation = trainer.evaluate(trainer.batches(batches))
        found.append({"losses": losses, "evaluation": evaluation, "state": trainer.state_dict()})
    return found


def uneven_net() -> nn.Sequential:
    """Four layers of which the first costs more than the others together."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 6), nn.Linear(6, 5), nn.Linear(5, 4))


def train_placed(
    folder: str, placement: Sequence[int] | None, replicas: int = 1
) -> tuple[tuple[int, ...], list[int], dict[str, Any]]:
    """A model whose cuts are given, trained, saved and resumed: who held what, and the end."""
    batches = vector_batches(6, rows=8, dtype=torch.float32)
    settings: dict[str, Any] = {
        "cuts": [1, 2, 3],
        "seed": 3,
        "replicas": replicas,
        "averaging": DaSGD(2, 1) if replicas > 1 else None,
        "machines": offbeat.Machines(placement=placement),
    }
    trainer = trainer_for(uneven_net(), StaleWeights(), **settings)
    for x, y in trainer.batches(batches[:3]):
        trainer.step(x, y)
    trainer.save(folder, wait=True)
    again = trainer_for(uneven_net(), StaleWeights(), **settings)
    again.resume(folder)
    assert again.placement == trainer.placement
    for x, y in again.batches(batches[3:]):
        again.step(x, y)
    again.flush()
    here = [worker.stage.index for worker in again._engine.workers]
    return again.placement, here, again.state_dict()


def outlive_weighted(dies: int, at: int, batches: list[Batch]) -> dict[str, Tensor]:
    """Three replicas that average gradients; one leaves before it is fed batch ``at``."""
    import os

    trainer = weighted_trainer(
        GPipe(2), "sgd", cuts=[], replicas=3, averaging=AllReduce(), when_replica_dies="go on"
    )
    for number, (x, y) in enumerate(trainer.batches(batches)):
        if (trainer.rank, number) == (dies, at):
            os._exit(1)
        trainer.step(x, y)
    trainer.flush()
    return trainer.state_dict()


def freeze(who: int, replicas: int, silence: float) -> dict[str, Any]:
    """Trains while one process stops itself in step 5; with replicas until it is back."""
    import logging
    import os
    import signal
    import time

    from offbeat.elastic.restarts import return_number

    said: list[tuple[float, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((time.time(), record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    more = {"when_replica_dies": "go on", "averaging": LocalSGD(2)} if replicas > 1 else {}
    trainer = trainer_for(
        dropout_net(),
        offbeat.Synchronous() if replicas > 1 else StaleWeights(),
        OPTIMIZERS["momentum"],
        stages=1 if replicas > 1 else 2,
        replicas=replicas,
        timeout=60.0,
        machines=offbeat.Machines(silence=silence),
        **more,
    )
    batches = vector_batches(12, rows=12, dtype=torch.float32) * 1000
    steps = 0
    for n, (x, y) in enumerate(trainer.batches(batches)):
        if (trainer.rank, n, return_number()) == (who, 5, 0):
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        trainer.step(x, y)
        steps += 1
        if return_number() or any("is back" in words for _, words in said):
            joined = trainer._engine.joined_at
            if trainer._pipeline.position.step >= joined + 20:
                break
        time.sleep(0.01)
    trainer.flush()
    return {"said": said, "steps": steps, "state": trainer.state_dict(), "time": time.time()}


def train_for_good(silence: float) -> None:
    """Two stages that train, evaluate and read weights until something ends them."""
    trainer = trainer_for(
        dropout_net(),
        StaleWeights(),
        OPTIMIZERS["momentum"],
        stages=2,
        timeout=60.0,
        machines=offbeat.Machines(silence=silence),
    )
    batches = vector_batches(12, rows=12, dtype=torch.float32)
    for _ in range(100_000):
        for x, y in trainer.batches(batches):
            trainer.step(x, y)
        trainer.state_dict()
        print("training", flush=True)
