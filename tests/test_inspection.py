"""What a stage has learnt of its modules, once it is no longer true: seen again, or refused."""

from __future__ import annotations

import copy
import random
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offbeat
from helpers import OPTIMIZERS, assert_same_bits, mlp, trained, trainer_for, vector_batches
from offbeat.averaging import LocalSGD
from offbeat.corrections import Predict
from offbeat.errors import BatchError, CheckpointError, ConfigurationError, OffbeatError, StageError
from offbeat.methods import (
    ADL,
    DSP,
    RULES,
    PipeDream,
    PipeDream2BW,
    Rule,
    StaleWeights,
    Synchronous,
)

BATCHES = vector_batches(10, dtype=torch.float32)

# ------------------------------------------------------------------ buffers under recompute


class Counts(nn.Module):
    """Writes one buffer from the first batch on and another only from the fourth."""

    calls: Tensor
    late: Tensor

    def __init__(self, how: str, size: int = 2) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        if self.calls > 3 and self.how == "in place":
            self.late.add_(1)
        elif self.calls > 3 and self.how == "uncounted":
            self.late.data.add_(1)
        elif self.calls > 3 and self.how == "anew":
            self.late = self.late + 1
        elif self.how == "from the first":
            self.late.add_(self.calls > 3)
        result: Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("how", ["in place", "uncounted", "anew", "from the first"])
def test_a_buffer_that_begins_to_change_later_counts_once_under_recompute(how: str) -> None:
    torch.manual_seed(0)
    trainer = trained([Counts(how), nn.Linear(6, 4)], BATCHES, DSP())
    state = trainer.state_dict()
    assert state["0.calls"] == 10
    assert state["0.late"].tolist() == [7, 7]


def test_a_large_buffer_that_begins_to_change_later_is_refused_under_recompute() -> None:
    torch.manual_seed(0)
    with pytest.raises(StageError, match=r"'late' of 64 KiB.*late.add_\(0\)"):
        trained([Counts("in place", 20_000), nn.Linear(6, 4)], BATCHES, DSP())
    for stage, method in (
        (Counts("from the first", 20_000), DSP()),
        (Counts("in place", 20_000), StaleWeights(backward="stash")),
    ):
        trainer = trained([stage, nn.Linear(6, 4)], BATCHES, method)
        assert (trainer.state_dict()["0.late"] == 7).all()


# ------------------------------------------------------------------ Python's and NumPy's draws


class Draws(nn.Module):
    """Scales by numbers that Python and NumPy draw, and remembers them by the batch's first value.

    ``draws``: shared with copies of the module, and None as long as nothing is drawn.
    """

    def __init__(self, draws: list[Any], seen: dict[float, list[tuple[float, ...]]]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.say: Any = lambda: (draws, seen)

    def forward(self, x: Tensor) -> Tensor:
        draws, seen = self.say()
        result: Tensor = self.linear(x)
        if not draws:
            return result
        numbers = random.random(), random.gauss(1, 0.1), float(np.random.normal(1, 0.1))
        seen.setdefault(x[0, 0].item(), []).append(numbers)
        return result * sum(numbers)


@pytest.mark.parametrize("rule", RULES)
def test_draws_of_python_and_numpy_are_keyed(rule: Rule) -> None:
    """Those of seed_for, as in a plain loop; the caller's generators stay where they are."""
    torch.manual_seed(0)
    seen: dict[float, list[tuple[float, ...]]] = {}
    stages = [Draws([1], seen), Draws([1], {}), nn.Linear(6, 4)]
    reference = nn.Sequential(*copy.deepcopy(stages))
    optimizer = OPTIMIZERS["momentum"](reference.parameters())
    for n, (x, y) in enumerate(BATCHES):
        hidden = x
        for k, stage in enumerate(reference):
            seed = offbeat.seed_for(5, stage=k, micro_batch=n)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            hidden = stage(hidden)
        optimizer.zero_grad()
        nn.functional.cross_entropy(hidden, y).backward()
        optimizer.step()
    np.random.normal(), random.gauss(0, 1)  # each keeps a second number for next time
    ahead = np.random.get_state(), random.getstate()
    for method in (DSP((0, 0, 0), backward=rule), Synchronous()):
        ours = trained(stages, BATCHES, method, seed=5)
        assert_same_bits(ours.state_dict(), reference.state_dict())
    assert repr((np.random.get_state(), random.getstate())) == repr(ahead)
    seen.clear()
    trained(stages, BATCHES, StaleWeights(backward=rule), seed=5)
    assert len(seen) == 10
    again = rule == "recompute"  # and the first once more, for whoever keeps features of it
    assert [len(numbers) for numbers in seen.values()] == [1 + 2 * again] + [1 + again] * 9
    assert all(len({*numbers}) == 1 for numbers in seen.values())


def test_draws_that_begin_later_are_replayed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    draws: list[Any] = []
    seen: dict[float, list[tuple[float, ...]]] = {}
    trainer = trainer_for([Draws(draws, seen), nn.Linear(6, 6), nn.Linear(6, 4)], DSP())
    for n, (x, y) in enumerate(BATCHES):
        draws += [n] * (n == 3)
        trainer.step(x, y)
        if n == 3:
            with pytest.raises(CheckpointError, match="first to draw.*drain=True"):
                trainer.save(tmp_path / "exact")
        elif n == 8:
            trainer.save(tmp_path / "exact")
    trainer.flush()
    replayed = [numbers for numbers in seen.values() if len(numbers) == 2]
    assert len(replayed) == 7
    assert all(one == other for one, other in replayed)


def test_generators_of_python_and_numpy_are_left_to_the_script_where_no_stage_draws() -> None:
    """Another thread, which draws while a stage runs, gets the numbers it would get alone."""
    torch.manual_seed(0)
    drawn: list[Any] = []

    class Meanwhile(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if meanwhile:
                drawn.append((random.random(), np.random.rand()))
            return super().forward(x)

    meanwhile = False
    trainer = trainer_for([Meanwhile(6, 6), nn.Linear(6, 4)], StaleWeights())
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    for n, (x, y) in enumerate(BATCHES[:3]):
        meanwhile = n == 2
        trainer.step(x, y)
    assert drawn == [expected]


# ------------------------------------------------------------------ what a script changes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.drop(torch.tanh(self.linear(hidden)))
        return result


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


class Tower(nn.Module):
    """A list of blocks between two ends that read attributes of the model."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.settings, self.temperature, self.sharp = Settings(), 1.0, False
        self.inlet = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.outlet = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.inlet(x) * self.temperature * self.settings.scale * scale
        for block in self.blocks:
            hidden = block(hidden)
        if self.sharp:
            hidden = torch.relu(hidden)
        result: Tensor = self.outlet(hidden) / self.temperature
        return result


class Branches(Tower):
    """The same as a model that can only be traced."""

    def __init__(self) -> None:
        super().__init__(1)
        self.block = self.blocks[0]
        del self.blocks

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.block(self.inlet(x) * self.temperature * scale)
        result: Tensor = self.outlet(hidden * self.settings.scale)
        return result


def double(self: Any, x: Tensor) -> Tensor:
    result: Tensor = 2 * type(self).forward(self, x)
    return result


def put_double(model: Any) -> None:
    model.forward = MethodType(double, model)


CHANGES: dict[str, Any] = {
    "a number": lambda m: setattr(m, "temperature", 0.5),
    "a number of the settings": lambda m: setattr(m.settings, "scale", 0.5),
    "a branch": lambda m: setattr(m, "sharp", True),
    "a drop rate": lambda m: setattr(m.blocks[1].drop, "p", 0.5),
    "a mode": lambda m: m.blocks[1].eval(),
    "a hook": lambda m: m.inlet.register_forward_hook(lambda _, __, output: output * 2) and None,
    "a method of a block": lambda m: put_double(m.blocks[0]),
}


def with_change(model: nn.Module, change: Any, method: Any = Synchronous(), **settings: Any) -> Any:
    """Trains, changes the model after the fifth batch, trains on; and says what it evaluates to."""
    model = copy.deepcopy(model)
    made = offbeat.Trainer(
        model, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["sgd"], method=method,
        seed=3, **settings,
    )  # fmt: skip
    for n, (x, y) in enumerate(BATCHES):
        if n == 5:
            change(model)
            made.evaluate(BATCHES[:1])
        made.step(x, y)
    made.flush()
    return made.state_dict(), made.evaluate(BATCHES[:2]).loss


@pytest.mark.parametrize("name", CHANGES)
def test_blocks_follow_what_a_script_changes(name: str) -> None:
    """As the whole model does, which one stage is."""
    model, change = Tower(), CHANGES[name]
    ours = with_change(model, change, stages=3)
    if name != "a drop rate":  # whose masks depend on the cut
        whole = with_change(model, change, stages=1)
        assert_same_bits(ours[0], whole[0])
        assert ours[1] == whole[1]
    unchanged = with_change(model, lambda _: None, stages=3)
    differ = any(not torch.equal(ours[0][key], unchanged[0][key]) for key in ours[0])
    assert differ == (name != "a mode")  # which only a drop rate would show


@pytest.mark.parametrize("name", ["a number", "a number of the settings", "a mode", "a drop rate"])
def test_replicas_follow_what_a_script_changes(name: str) -> None:
    """All see the same batches here, so that two do what one does."""
    model, change = Tower(), CHANGES[name]
    twice = [(torch.cat([x, x]), torch.cat([y, y])) for x, y in BATCHES]
    states = []
    for replicas, batches in ((1, BATCHES), (2, twice)):
        own = copy.deepcopy(model)
        made = offbeat.Trainer(
            own, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["sgd"], stages=3,
            replicas=replicas, averaging=LocalSGD(every=100),
        )  # fmt: skip
        for n, (x, y) in enumerate(batches):
            if n == 5:
                change(own)
            made.step(x, y)
        states.append(made._pipeline.models.cuts[-1].model.state_dict())
    if name != "a drop rate":
        assert_same_bits(states[1], states[0])


TRACED = {n: CHANGES[n] for n in CHANGES if "block" not in n and n not in ("a drop rate", "a mode")}
TRACED["a drop rate"] = lambda m: setattr(m.block.drop, "p", 0.5)
TRACED["a method"] = put_double


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_model_refuses_what_a_script_changes(name: str) -> None:
    with pytest.raises(OffbeatError, match="since this model was traced.*Put it back"):
        with_change(Branches(), TRACED[name], cuts=["block"])

    def there_and_back(model: Any) -> None:
        model.temperature = 0.5
        with pytest.raises(OffbeatError, match="temperature was changed from 1.0 to 0.5"):
            made.step(*BATCHES[0])
        model.temperature = 1.0

    made = trainer_for(Branches(), cuts=["block"])  # type: ignore[arg-type]
    made.step(*BATCHES[0])
    there_and_back(made.model)
    made.step(*BATCHES[0])


def test_a_traced_model_follows_modes_and_numbers_in_a_batch() -> None:
    model = Branches()
    states = []
    for settings in ({"stages": 1}, {"cuts": ["block"]}):
        made = trainer_for(model, **settings)  # type: ignore[arg-type]
        for n, (x, y) in enumerate(BATCHES[:4]):
            made.model.get_submodule("block").train(n < 2)
            made.step({"x": x, "scale": (1.0, 0.5)[n % 2]}, y)
        states.append(made.state_dict())
    assert_same_bits(states[1], states[0])


def test_a_traced_model_refuses_a_new_number_in_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.cutting.traced._MOST_RECORDS", 3)
    made = trainer_for(Branches(), cuts=["block"])  # type: ignore[arg-type]
    (x, y), *_ = BATCHES
    for scale in (1.0, 0.5, 1.0, 0.5):
        made.step({"x": x, "scale": scale}, y)
    with pytest.raises(BatchError, match="3 records.*as tensors.*pad"):
        made.step({"x": x, "scale": 0.2}, y)
    made.step({"x": x, "scale": 1.0}, y)
    made = trainer_for(Branches(), cuts=["block"])  # type: ignore[arg-type]
    for number in (1.0, 0.5, 0.2, 0.1):
        made.step({"x": x, "scale": torch.tensor([number])}, y)


def test_what_is_put_on_a_sequential_later_is_refused() -> None:
    """Before it began, the model is no chain of its layers."""
    (x, y), *_ = BATCHES
    for change in (put_double, lambda m: m.register_forward_hook(lambda _, __, output: 2 * output)):
        made = trainer_for(mlp(dtype=torch.float32), cuts=[2])
        made.step(x, y)
        change(made.model)
        with pytest.raises(ConfigurationError, match="stages call its layers.*on layers"):
            made.step(x, y)
    made = trainer_for(mlp(dtype=torch.float32), cuts=[2])
    made.model.add_module("7", nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match="^7 was replaced after this trainer began"):
        made.step(x, y)
    whole, cut = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    for model in (whole, cut):
        put_double(model)
    states = [
        with_change(model, lambda _: None, **settings)[0]
        for model, settings in ((whole, {"stages": 1}), (cut, {"cuts": ["2", "4"]}))
    ]
    assert_same_bits(states[1], states[0])


@pytest.mark.parametrize("part", ["blocks.1.linear", "blocks.1"])
def test_parts_that_are_replaced_are_refused(part: str) -> None:
    made = trainer_for(Tower(), stages=3)  # type: ignore[arg-type]
    made.step(*BATCHES[0])
    made.model.set_submodule(part, Block() if part == "blocks.1" else nn.Linear(6, 6))
    with pytest.raises(ConfigurationError, match=f"^{part} was replaced.*batch was not started"):
        made.step(*BATCHES[0])


def test_a_forward_that_is_replaced_later_is_refused() -> None:
    made = trainer_for(Tower(), stages=3)  # type: ignore[arg-type]
    made.step(*BATCHES[0])
    put_double(made.model)
    with pytest.raises(ConfigurationError, match="forward was replaced after.*was cut.*autocast="):
        made.step(*BATCHES[0])
    for put in (put_double, lambda m: setattr(m, "forward", partial(double, m))):
        whole, cut = Tower(), Tower()
        for model in (whole, cut):
            put(model)
        states = [with_change(m, lambda _: None, stages=n)[0] for m, n in ((whole, 1), (cut, 3))]
        assert_same_bits(states[1], states[0])


def test_mixed_precision_put_on_a_model_is_refused_where_stages_would_leave_it() -> None:
    """As accelerate does it."""
    model = Tower()
    autocast = torch.autocast("cpu", torch.bfloat16)
    model.forward = MethodType(autocast(type(model).forward), model)  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="forward was replaced.*autocast=torch.bfloat16"):
        trainer_for(model, stages=3).step(*BATCHES[0])  # type: ignore[arg-type]


# ------------------------------------------------------------------ weights that graphs hide


class KeepsWeight(torch.autograd.Function):
    """A linear layer without bias that keeps its weight where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight.detach()
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.weight, gradients[0].T @ x


class Hides(nn.Module):
    """Two layers, of which a graph shows all, or hides some in one way or another."""

    def __init__(self, how: str = "", say: Any = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.drop, self.how, self.say = nn.Dropout(0.2), how, say

    def body(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return result

    def forward(self, x: Tensor) -> Tensor:
        how = self.how if self.say is None else self.say()
        x = x.tanh()
        if how == "checkpoint":
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        if how == "reentrant":
            return checkpoint(self.body, x, use_reentrant=True)  # type: ignore[no-any-return]
        if how == "ctx":
            hidden = KeepsWeight.apply(x, self.one.weight)  # type: ignore[no-untyped-call]
            return self.drop(torch.tanh(self.two(torch.tanh(hidden))))  # type: ignore[no-any-return]
        return self.body(x)


def hiding(how: str = "", say: Any = None) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), Hides(how, say), Hides(how, say), nn.Linear(6, 4)]


def steps_of(
    model: list[nn.Module], method: Any, change: Any = lambda _: None, **settings: Any
) -> Any:
    """Every loss and all weights, of a model that is changed after the sixth batch."""
    made = trainer_for(model, method, seed=1, **settings)
    for n, (x, y) in enumerate(vector_batches(14, dtype=torch.float32)):
        if n == 6:
            change(made.model)
        made.step(x, y)
    made.flush()
    return made.state_dict() | {"losses": torch.tensor([*made.ledger.losses(3).values()])}


STASHED = [
    PipeDream(),
    StaleWeights(backward="stash"),
    ADL(3),
    PipeDream(accumulate=2),
    PipeDream2BW(),
]


@pytest.mark.parametrize("how", ["checkpoint", "ctx"])
@pytest.mark.parametrize("method", [*STASHED, Synchronous()], ids=str)
def test_hidden_weights_are_those_of_the_forward_under_stash(method: Any, how: str) -> None:
    assert_same_bits(steps_of(hiding(how), method), steps_of(hiding(), method))


def test_hidden_weights_are_the_predicted_ones_under_stash() -> None:
    ours, plain = (
        steps_of(hiding(how), PipeDream(), corrections=[Predict()]) for how in ("checkpoint", "")
    )
    assert_same_bits(ours, plain)


@pytest.mark.parametrize("how", ["checkpoint", "ctx"])
def test_weights_that_begin_to_hide_are_those_of_the_forward_under_stash(how: str) -> None:
    """A flag that the script sets; and a forward that begins to by itself."""
    expected = steps_of(hiding(), PipeDream())

    def set_all(model: Any) -> None:
        for stage in (model[1], model[2]):
            stage.how = how

    assert_same_bits(steps_of(hiding(), PipeDream(), set_all), expected)
    now: list[str] = [""]
    begun = steps_of(hiding(say=lambda: now[-1]), PipeDream(), lambda _: now.append(how))
    assert_same_bits(begun, expected)


@pytest.mark.parametrize(
    ("how", "rule", "words"),
    [
        ("checkpoint", "current", "hooks of their own.*backward='stash'.*use_reentrant=False"),
        ("reentrant", "current", "reentrant.*use_reentrant=False"),
        ("reentrant", "stash", "reentrant.*use_reentrant=False"),
    ],
)
def test_what_hides_is_refused_when_it_begins(how: str, rule: Rule, words: str) -> None:
    method = StaleWeights(backward=rule)
    now: list[str] = [""]
    with pytest.raises(StageError, match=words):
        steps_of(hiding(how), method)
    with pytest.raises(StageError, match=words):
        steps_of(hiding(), method, lambda model: setattr(model[1], "how", how))
    with pytest.raises(StageError, match=words):
        steps_of(hiding(say=lambda: now[-1]), method, lambda _: now.append(how))


def test_checkpoints_save_memory_and_keep_a_copy_of_each_version() -> None:
    memory = {}
    for how in ("", "checkpoint"):
        made = trainer_for(hiding(how), PipeDream())
        for x, y in BATCHES:
            made.step(x, y)
        memory[how] = made.memory()
    for plain, ours, versions in zip(memory[""], memory["checkpoint"], (4, 3, 2, 1), strict=True):
        assert ours.in_flight_bytes <= plain.in_flight_bytes
        if versions in (3, 2):
            assert ours.peak_weight_copies == plain.peak_weight_copies == versions
            assert ours.in_flight_bytes < plain.in_flight_bytes / 2


def test_hidden_weights_in_flight_are_not_stored(tmp_path: Path) -> None:
    made = trainer_for(hiding("checkpoint"), PipeDream())
    for x, y in BATCHES[:4]:
        made.step(x, y)
    with pytest.raises(CheckpointError, match="keeps weights.*drain=True"):
        made.save(tmp_path / "exact")
    made.save(tmp_path / "drained", drain=True)


def test_a_structure_that_changes_with_every_run_is_refused_or_kept_whole() -> None:
    """Where a second look shows another forward, nobody can say what the first one kept."""

    def odd(now: list[int]) -> Any:
        def say() -> str:
            now.append(0)
            return "checkpoint" if len(now) % 2 else ""

        return say

    plain = steps_of(hiding(), PipeDream())
    assert_same_bits(steps_of(hiding(say=odd([0])), PipeDream()), plain)
    with pytest.raises(StageError, match="hooks of their own|saves .* tensors and then"):
        steps_of(hiding(say=odd([0])), StaleWeights())


@pytest.mark.parametrize("method", STASHED, ids=str)
def test_tied_weights_that_hide_are_those_that_arrived(method: Any) -> None:
    states = []
    for how in ("checkpoint", ""):
        stages = hiding(how)
        assert isinstance(stages[2], Hides) and isinstance(stages[1], Hides)
        stages[2].one.weight = stages[1].two.weight
        states.append(steps_of(stages, method))
    assert_same_bits(*states)
