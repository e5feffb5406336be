"""Random programs: the bits of a plain loop or of an oracle, or a refusal in words; nothing else.

``benchmarks/programs`` tries thousands and stores what became of them.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn

import offbeat
import oracles
from helpers import OPTIMIZERS, assert_same_bits
from offbeat import nest
from offbeat.cutting import blocks, doors
from offbeat.engines.models import Models
from offbeat.errors import OffbeatError
from offbeat.methods import DDG, DSP, FeaturesReplay, PipeDream, PipeDream2BW, StaleWeights
from offbeat.stages.network import Network
from programs import (
    Program,
    batches_of,
    build,
    change,
    cuts_of,
    has_lag,
    loss_of,
    penalty_of,
    programs,
    starts_of,
)  # fmt: skip

SEED = 5
"""Of dropout."""


def call(model: nn.Module, x: Any) -> Any:
    names = isinstance(x, dict) and not isinstance(model, nn.Sequential)
    return model(**x) if names else model(x)


# ------------------------------------------------------------------ what must come out


def micro_batches(program: Program) -> list[list[tuple[Any, Tensor, float]]]:
    method: Any = program.method
    parts = (
        method.accumulate if hasattr(method, "accumulate") else getattr(method, "micro_batches", 1)
    )
    groups = []
    for x, y in batches_of(program):
        pieces = zip(nest.split(x, parts), y.tensor_split(parts), strict=True)
        groups.append([(xs, ys, 1.0 if parts == 1 else len(ys) / len(y)) for xs, ys in pieces])
    return groups


class Keys:
    """Seeds the generator where a stage begins, as the page about exactness says."""

    def __init__(self, program: Program) -> None:
        self._program, self.micro_batch = program, -1

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda *_: self._begin(0))
        for stage, start in enumerate(starts_of(self._program, model), 1):
            start.register_forward_pre_hook(lambda *_, stage=stage: self._begin(stage))

    def _begin(self, stage: int) -> None:
        number = offbeat.seed_for(SEED, stage=stage, micro_batch=self.micro_batch)
        torch.manual_seed(number)

    def apply(self, model: nn.Module, x: Any) -> Any:
        return call(model, x)


def plain(program: Program) -> tuple[dict[str, Any], list[float]]:
    """The loop that an engineer writes."""
    model, keys = build(program), Keys(program)
    keys.attach(model)
    trainable = list(model.parameters())
    optimizer = OPTIMIZERS[program.optimizer](trainable)
    losses = []
    for number, group in enumerate(micro_batches(program)):
        for what in program.happens(number):
            change(model, *what)
        optimizer.zero_grad()
        total = 0.0
        for part, (x, y, share) in enumerate(group):
            keys.micro_batch += 1
            loss = loss_of(call(model, x), y)
            loss = loss if share == 1.0 else loss * share
            total += loss.item()
            if program.quirk("penalty") and part == 0:
                loss = loss + penalty_of(model.named_parameters())
            loss.backward()
        if program.quirk("clip"):
            nn.utils.clip_grad_norm_(trainable, program.quirk("clip"))
        optimizer.step()
        losses.append(total)
    return dict(model.state_dict()), losses


def late(program: Program, trainer: offbeat.Trainer) -> dict[str, Any]:
    """What the method's equation says of the whole model."""
    method, count = program.method, len(program.places) + 1
    groups = micro_batches(program)
    parts = len(groups[0])
    ways = 1 if isinstance(method, PipeDream | DDG | FeaturesReplay) else 2

    def read(stage: int, i: int) -> int:
        if isinstance(method, PipeDream2BW):
            return max(0, i // parts - 1)
        return max(0, i - ways * (count - 1 - stage)) // parts

    names = {id(p): name for name, p in trainer.model.named_parameters()}
    stages = [[names[id(p)] for p in w.stage.parameters] for w in trainer._engine.workers]
    keys = Keys(program)
    numbers = iter(range(10**6))

    def before(model: nn.Module, number: int) -> None:
        if number == 0:
            keys.attach(model)
        for what in program.happens(number):
            if what[0] != "kept":  # it runs forwards again outside of functional_call()
                change(model, *what)

    def apply(model: nn.Module, x: Any) -> Any:
        # Under "recompute" a micro-batch runs twice.
        keys.micro_batch = next(numbers) // (2 if method.rule == "recompute" else 1)
        return call(model, x)

    model = oracles.whole_in_parts(
        method.rule, build(program), stages, groups, loss_of, OPTIMIZERS[program.optimizer], read,
        apply, before=before, penalty=penalty_of if program.quirk("penalty") else None,
        starts=lambda model: starts_of(program, model),
    )  # fmt: skip
    return dict(model.state_dict())


# ------------------------------------------------------------------ what comes out


def trainer_of(program: Program, model: nn.Module) -> offbeat.Trainer:
    return offbeat.Trainer(
        model, loss=loss_of, optimizer=OPTIMIZERS[program.optimizer], method=program.method,
        cuts=cuts_of(program), seed=SEED, clip=program.quirk("clip"), weight="rows",
        penalty=penalty_of if program.quirk("penalty") else None,
    )  # fmt: skip


def trained(program: Program) -> tuple[offbeat.Trainer, list[float]]:
    model = build(program)
    trainer = trainer_of(program, model)
    losses: list[Tensor | None] = []
    for number, (x, y) in enumerate(batches_of(program)):
        if number and number == program.quirk("resume"):
            with tempfile.TemporaryDirectory() as folder:
                trainer.save(folder, wait=True)
                model = build(program)
                for step in range(number):
                    for what in program.happens(step):
                        change(model, *what)
                trainer = trainer_of(program, model)
                assert trainer.resume(folder).step == number
        for what in program.happens(number):
            change(model, *what)
        losses.append(trainer.step(x, y))
        if number == program.quirk("evaluate"):
            trainer.evaluate(batches_of(program)[:2])
            trainer.state_dict()
    losses += trainer.flush()
    return trainer, [float(loss) for loss in losses if loss is not None]


def outcome(program: Program) -> str:
    """What became of it: exact, or refused; raises where it is neither."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            trainer, losses = trained(program)
        except OffbeatError as error:
            said = str(error)
            assert len(said) > 40 and "object at 0x" not in said, said
            return f"refused: {said}"
        if not has_lag(program.method):
            expected, theirs = plain(program)
            assert losses == pytest.approx(theirs, rel=1e-5)
        else:
            expected = late(program, trainer)
        assert_same_bits(trainer.state_dict(), expected)
        return "exact"


# ------------------------------------------------------------------ tried


def tries(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@tries(50)
@given(programs())
def test_a_random_program_is_exact_or_refused_in_words(program: Program) -> None:
    outcome(program)


def program(**quirks: Any) -> Program:
    settings = {
        "kind": "blocks", "places": (1, 2), "blocks": 3, "method": PipeDream(),
        "optimizer": "momentum", "lengths": (2, 5, 4, 5, 4), "rows": (4, 3, 4, 4, 4),
    }  # fmt: skip
    names = [name for name in quirks if name in Program.__dataclass_fields__]
    settings |= {name: quirks.pop(name) for name in names}
    return Program(**settings, quirks=quirks)  # type: ignore[arg-type]


FOUND = {
    "an evaluation wrote a buffer": program(counter="before", evaluate=2),
    "recorded in place of cut, and resumed": program(skip="always", resume=2),
    "torch.export replaced a dict": program(
        kind="traced", places=(1,), changes=((2, "eval", 0),), dropout=0.3, lengths=(4, 4, 4),
        rows=(4, 4, 4),
    ),
}  # fmt: skip
"""Programs that went wrong or were refused for no reason."""


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_went_wrong_is_exact(name: str) -> None:
    assert outcome(FOUND[name]) == "exact"


def test_modules_that_are_looked_at_again_give_the_same_bits() -> None:
    """Under recompute a first forward had a graph, and matmul rounded otherwise in it."""
    late = program(method=DSP(), places=(1,), mask="learned", lengths=(4,) * 6, rows=(4,) * 6)
    states = []
    for asked in (None, 3):
        model = build(late)
        trainer = trainer_of(late, model)
        for number, (x, y) in enumerate(batches_of(late)):
            if number == asked:
                model.note = 1  # type: ignore[assignment]
            trainer.step(x, y)
        trainer.flush()
        states.append(trainer.state_dict())
    assert_same_bits(*states)


@pytest.mark.parametrize("what", [("gain", 0, 0.5), ("hook", 0), ("temperature", 0.5)])
@pytest.mark.parametrize("method", [PipeDream(), StaleWeights()], ids=str)
def test_a_graph_from_before_a_change_is_not_stored(method: Any, what: Any) -> None:
    """Its factor came back as the new one, and the run went on with another gradient."""
    late = program(method=method, changes=((2, *what),), resume=3)
    assert "was changed while a batch was in flight" in outcome(late)
    in_time = program(method=method, changes=((2, *what),), resume=2)
    assert outcome(in_time) == "exact"


# ------------------------------------------------------------------ would it see an error?


def one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a stage are called as its first: short batches do not show it."""
    right = doors.read_calls

    def wrong(words: str, own: range) -> Any:
        calls, needed = right(words, own)
        more, named = calls[0].arguments[1:], calls[0].settings
        same = [c._replace(arguments=[c.arguments[0], *more], settings=named) for c in calls]
        return same, needed

    monkeypatch.setattr(blocks, "read_calls", wrong)


def no_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script changes is not followed by the copies of a model's ends."""
    monkeypatch.setattr(Models, "follow", lambda self: [])


def no_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "_compute_penalty", lambda self: None)


def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch draws the same numbers."""
    monkeypatch.setattr(
        Network, "seed_of", lambda self, batch: offbeat.seed_for(SEED, stage=0, micro_batch=0)
    )


@pytest.mark.parametrize(
    ("mutation", "quirk"),
    [(one_mask, "mask"), (no_attributes, "changes"), (no_penalty, "penalty"), (one_key, "dropout")],
)
def test_an_error_would_be_found(
    mutation: Any, quirk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)

    @tries(100)
    @given(programs(("blocks",), (quirk,)))
    def look(program: Program) -> None:
        outcome(program)

    with pytest.raises(AssertionError):
        look()
