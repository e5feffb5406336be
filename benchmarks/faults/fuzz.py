"""Damaged input of every kind that offbeat reads: an error of its own, or an equal result.

    python -m benchmarks.faults.fuzz --seed 24 --count 50000 --out benchmarks/faults/fuzz.jsonl

What is sound is damaged at random: bytes (cut, put in, written over, one bit) and, where it is
JSON, values (another one, of another kind, none). What comes out is either refused, with an error
of this library's that says something, or *equal*: what was read, written and read once more, is the
same; and where a digest goes with it, the same as before the damage. Anything else is written down
with the input and ends in exit code 1. ``tests/test_fuzz.py`` does some of each kind.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat.app.experiment import Experiment
from offbeat.app.verification import verify_run
from offbeat.checkpoints import load_weights, save_weights, tensorfile
from offbeat.checkpoints.folder import MANIFEST, Found
from offbeat.errors import OffbeatError
from offbeat.records import disk
from offbeat.records.ledger import Ledger
from offbeat.transport.base import Key
from offbeat.transport.wire import Arrival, pack

STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 0.5, 1e999, float("nan"), "", "x", "0",
    "../../etc/passwd", "\ud800", [], {}, [[]], [None], {"": None}, {"tensor": 0}, {"tuple": []},
    {"numpy": ["|O", "00" * 8]}, {"dict": [[[1], 2]]}, ["a", "b"], [0, -1], "9" * 5000,
]  # fmt: skip
RUBBISH = [b"", b"\x00", b"\xff", b"{", b"[" * 3000, b"null", b"NaN", b"-1", b'"', b"9" * 30]


def damaged(draw: random.Random, sound: bytes) -> bytes:
    """The same with some bytes changed."""
    data = bytearray(sound)
    for _ in range(draw.randint(1, 3)):
        place, size = draw.randint(0, len(data)), draw.choice([1, 2, 8, 100])
        rubbish = draw.choice(RUBBISH) if draw.random() < 0.5 else draw.randbytes(size)
        kind = draw.choice(["bit", "bit", "cut", "put", "over", "out", "double"])
        if kind == "bit" and data:
            data[place % len(data)] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del data[place:]
        elif kind == "put":
            data[place:place] = rubbish
        elif kind == "over":
            data[place : place + len(rubbish)] = rubbish
        elif kind == "out":
            del data[place : place + size]
        else:
            data[place:place] = data[place : place + size]
    return bytes(data)


def changed(draw: random.Random, sound: Any) -> Any:
    """The same JSON with some values changed."""
    value = json.loads(json.dumps(sound))
    for _ in range(draw.randint(1, 3)):
        inner = value
        while isinstance(inner, dict | list) and inner:
            places = list(inner) if isinstance(inner, dict) else range(len(inner))
            key = draw.choice(places)
            below = inner[key]
            if isinstance(below, dict | list) and below and draw.random() < 0.9:
                inner = below
                continue
            kind = draw.choice(["other", "other", "none", "near", "again"])
            if kind == "none":
                del inner[key]
            elif kind == "near" and isinstance(below, int | float):
                inner[key] = below + draw.choice([-1, 1, 0.5, -(10**9)])
            elif kind == "again" and isinstance(inner, list):
                inner.insert(key, copy.deepcopy(below))
            else:
                inner[key] = copy.deepcopy(draw.choice(STRANGE))
            break
    return value


def same(one: Any, other: Any) -> bool:
    """Type for type and bit for bit, NaN like NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.size(), one.requires_grad)
        if alike != (other.dtype, other.size(), other.requires_grad):
            return False
        copies = (torch.empty(t.size(), dtype=t.dtype).copy_(t.detach()) for t in (one, other))
        ours, theirs = (bits.reshape(-1).view(torch.uint8) for bits in copies)
        return torch.equal(ours, theirs)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True) if len(one) == len(other) else ()
        return len(one) == len(other) and all(same(a, b) and same(c, d) for (a, c), (b, d) in pairs)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)
    return bool(one == other) or repr(one) == repr(other)


class Different(AssertionError):
    """What came out is neither an error of ours nor the same."""


def require(held: bool, words: str) -> None:
    if not held:
        raise Different(words)


NEST = {
    "x": torch.arange(40.0).reshape(5, 8), "view": torch.ones(6)[1:4], "of": [1, 2.5, None, "y"],
    "size": torch.Size([2, 3]), 3: (True, b"bytes", 1j, torch.float16), "none": torch.empty(0),
}  # fmt: skip


class Inputs:
    """Sound examples of everything, and what reads each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._train()
        self.header = pack(Key("activation", 1, 0), NEST).header
        self.tensors = tensorfile.to_bytes(NEST)
        weights = {"a": torch.ones(3, 4), "b": torch.arange(5), "c": torch.ones(2).half()}
        weights["tied"] = weights["a"]
        save_weights({**weights, "number": 3}, folder / "weights.safetensors")
        self.weights = (folder / "weights.safetensors").read_bytes()
        place = next((folder / "run").glob("step-*2"))
        self.place, self.manifest = place, json.loads((place / MANIFEST).read_text())
        del self.manifest["digest"]
        self.file = next(iter(sorted(place.glob("replica*"))))
        self.experiment = Experiment(max_steps=3, stages=2).as_dict()

    def _build(self) -> offbeat.Trainer:
        torch.manual_seed(0)
        return offbeat.Trainer(
            nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
            loss=nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            method="stale-weights",
            cuts=[1],
        )

    def _train(self) -> None:
        for folder, drain in (("run", False), ("drained", True)):
            trainer = self._build()
            for _ in range(2):
                trainer.step(torch.ones(2, 2), torch.zeros(2).long())
                trainer.save(self.folder / folder, wait=True, drain=drain)
            trainer.ledger.save(self.folder / "ledger.jsonl")
            told = disk.sealed(trainer.ledger.certificate())
            del trainer
        self.ledger = (self.folder / "ledger.jsonl").read_bytes()
        self.certificate, _ = disk.unsealed(told)

    # ---------------------------------------------------------------- what reads them

    def headers(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            raw = damaged(draw, self.header)
        else:
            raw = json.dumps(changed(draw, json.loads(self.header))).encode()
        arrival = Arrival(raw)
        for buffer in arrival.buffers:
            buffer.fill_(1)
        message = arrival.message()
        parcel = pack(arrival.key, message)
        again = Arrival(parcel.header)
        for buffer, body in zip(again.buffers, parcel.tensors, strict=True):
            buffer.copy_(body)
        require(same(again.message(), message), "a message that does not arrive as it was sent")

    def tensor_files(self, draw: random.Random) -> None:
        path = self.folder / "damaged.safetensors"
        if draw.random() < 0.5:
            self._tensors(draw, path)
        else:
            self._weights(draw, path)

    def _tensors(self, draw: random.Random, path: Path) -> None:
        path.write_bytes(self._reheaded(draw, self.tensors))
        value = tensorfile.read(path)
        again = tensorfile.from_bytes(tensorfile.to_bytes(value))
        require(same(again, value), "values that are not read as they are written")

    def _weights(self, draw: random.Random, path: Path) -> None:
        path.write_bytes(self._reheaded(draw, self.weights))
        state = load_weights(path)
        save_weights(state, path)
        again = load_weights(path)
        require(same(dict(sorted(again.items())), dict(sorted(state.items()))), "other weights")

    @staticmethod
    def _reheaded(draw: random.Random, sound: bytes) -> bytes:
        """Bytes changed, or values of the header."""
        if draw.random() < 0.4:
            return damaged(draw, sound)
        size = int.from_bytes(sound[:8], "little")
        header = json.loads(sound[8 : 8 + size])
        words = header["__metadata__"]
        if "value" in words and draw.random() < 0.7:
            words["value"] = json.dumps(changed(draw, json.loads(words["value"])))
        else:
            header = changed(draw, header)
        new = json.dumps(header).encode()
        return len(new).to_bytes(8, "little") + new + sound[8 + size :]

    def manifests(self, draw: random.Random) -> bool:
        """Of an exact checkpoint with an older one beside it: this one, or the older, is used."""
        sound = (self.place / MANIFEST).read_bytes()
        new = damaged(draw, sound)
        try:
            (self.place / MANIFEST).write_bytes(new)
            found = Found.at(self.place, 2)
            problem = found.problem(list(found.manifest.get("files", ())))
            told = {name: value for name, value in found.manifest.items() if name != "digest"}
            require(problem is not None or same(told, self.manifest), "a manifest that was changed")
            if draw.random() < 0.05:
                self._resume(1 if problem else 2)
            return problem is not None
        finally:
            (self.place / MANIFEST).write_bytes(sound)

    def _resume(self, step: int | None) -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed = self._build().resume(self.place.parent)
        require(resumed.step == step, f"step {resumed.step} was resumed instead of {step}")
        require(step == 2 or "cannot be used" in str(said[0].message), "nothing was said")

    def sealed_manifests(self, draw: random.Random) -> None:
        """By somebody who writes a digest, too, or as an earlier version did, without one."""
        folder = self.folder / draw.choice(["run", "drained"])
        place = next(folder.glob("step-*2"))
        sound = (place / MANIFEST).read_text()
        words = json.loads(sound)
        del words["digest"]
        words = changed(draw, words)
        try:
            if draw.random() < 0.5:
                (place / MANIFEST).write_text(disk.sealed(words))
            else:
                (place / MANIFEST).write_text(json.dumps({**words, "format": 2}))
            with warnings.catch_warnings(action="ignore"):
                resumed = self._build().resume(folder)
            require(resumed.step in (1, 2), "another step")
        finally:
            (place / MANIFEST).write_text(sound)

    def checkpoint_files(self, draw: random.Random) -> bool:
        """A file of a checkpoint that is not as it was written is noticed, whatever has changed."""
        sound = self.file.read_bytes()
        new = damaged(draw, sound)
        try:
            self.file.write_bytes(new)
            problem = Found.at(self.place, 2).problem([self.file.name])
            require((problem is None) == (new == sound), f"{problem} was said")
            return problem is not None
        finally:
            self.file.write_bytes(sound)

    def ledgers(self, draw: random.Random) -> None:
        path = self.folder / "damaged.jsonl"
        if draw.random() < 0.5:
            path.write_bytes(damaged(draw, self.ledger))
        else:
            lines = [json.loads(line) for line in self.ledger.splitlines()[:6]]
            path.write_text("".join(json.dumps(row) + "\n" for row in changed(draw, lines)))
        ledger = Ledger.load(path)
        rows = list(ledger)
        ledger.save(path)
        again = list(Ledger.load(path))
        require(same(again, rows), "entries that are not read as they are written")
        ledger.tally(), ledger.chrome_trace(), ledger.certificate()

    def certificates(self, draw: random.Random) -> None:
        folder = self.folder / "certified"
        folder.mkdir(exist_ok=True)
        words = disk.sealed(self.certificate).encode()
        if draw.random() < 0.3:
            words = damaged(draw, words)
        elif draw.random() < 0.9:
            words = disk.sealed(changed(draw, self.certificate)).encode()
        (folder / "certificate.json").write_bytes(words)
        for holds, said in verify_run(folder):
            require(type(holds) is bool and len(said) > 10, said)

    def configurations(self, draw: random.Random) -> None:
        words = changed(draw, {k: v for k, v in self.experiment.items() if v is not None})
        if draw.random() < 0.5:
            experiment = Experiment.read(words)
        else:
            path = self.folder / "run.toml"
            lines = (f"{json.dumps(k)} = {_toml(v)}" for k, v in words.items())
            content = "\n".join(lines).encode(errors="replace")
            path.write_bytes(damaged(draw, content) if draw.random() < 0.5 else content)
            experiment = Experiment.read(Experiment.from_toml(path))
        again = Experiment.read(experiment.as_dict())
        require(again == experiment or repr(again) == repr(experiment), "another configuration")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '"none"' if value is None else json.dumps(value).replace("NaN", "nan")


KINDS = (
    "headers", "tensor_files", "manifests", "sealed_manifests", "checkpoint_files", "ledgers",
    "certificates", "configurations",
)  # fmt: skip


@dataclass
class Report:
    """What became of inputs of one kind."""

    what: str
    seed: int
    outcomes: Counter[str]
    others: list[str]
    """Errors that are not this library's, and results that are not equal."""


def _try(read: Callable[[random.Random], bool | None], draw: random.Random) -> str:
    try:
        return "refused" if read(draw) else "equal"
    except OffbeatError as error:
        said = str(error)
        return "refused" if len(said) > 20 and "object at 0x" not in said else f"says {said!r}"
    except Exception as error:  # what this looks for
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return f"{type(error).__name__}: {error}"[:300] + f" ({where})"


def fuzz(inputs: Inputs, what: str, seed: int, count: int, first: int = 0) -> Report:
    """Every input has a seed of its own, so that one that is not answered can be had again."""
    report = Report(what, seed, Counter(), [])
    for number in range(first, first + count):
        outcome = _try(getattr(inputs, what), random.Random(f"{what}/{seed}/{number}"))
        known = outcome in ("refused", "equal")
        report.outcomes[outcome if known else "other"] += 1
        if not known:
            report.others.append(f"input {number}: {outcome}")
    return report


@contextmanager
def sound_inputs() -> Iterator[Inputs]:
    with tempfile.TemporaryDirectory() as folder:
        yield Inputs(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first input, to see one again")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    with sound_inputs() as inputs:
        for what in given.kinds:
            began = time.monotonic()
            report = fuzz(inputs, what, given.seed, given.count, given.first)
            row = {
                "what": what, "seed": given.seed, "inputs": given.count,
                **{name: report.outcomes[name] for name in ("refused", "equal", "other")},
                "python": sys.version.split()[0], "torch": torch.__version__,
            }  # fmt: skip
            print(json.dumps(row), f"{time.monotonic() - began:.0f} s", flush=True)
            print(*report.others[:20], sep="\n", file=sys.stderr, flush=True)
            failed += len(report.others)
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
