"""The streams engine: what can be said about it without a GPU.

A pretended lane records by running a function and undoing it, and replays by running it again. So
slots, stashed copies, gradients' places, updates and messages are the engine's own; only CUDA is
not. ``benchmarks/one_gpu/bits.py`` makes the same comparison on a real one.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from types import MethodType
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offbeat
from checkpoint_jobs import METHODS as RESUMED_METHODS
from checkpoint_jobs import fresh, go_on, job_of, reading
from helpers import (
    OPTIMIZERS,
    assert_same_bits,
    cnn,
    image_batches,
    mlp,
    trained,
    trainer_for,
    vector_batches,
)
from jobs import (
    counted_tokens,
    padded_batches,
    tied_net,
    token_loss,
    token_net,
    weighted_trainer,
)
from offbeat import nest, transport
from offbeat.app.build import optimizer_factory
from offbeat.app.experiment import Experiment
from offbeat.averaging import AllReduce
from offbeat.corrections import (
    CORRECTIONS,
    Extrapolate,
    GapAware,
    Predict,
    RateByLag,
    SpikeCompensation,
)
from offbeat.engines import checks, streams
from offbeat.errors import ConfigurationError, GuardError, StageError
from offbeat.guards import Guards
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    METHODS,
    RULES,
    Phases,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)
from offbeat.optimizers import Muon
from offbeat.records.ledger import Ledger
from offbeat.rng import seeded
from offbeat.stages import lanes
from offbeat.stages.lanes import Lanes, NotRecordable
from offbeat.stages.network import Network
from offbeat.stages.recorded import Recorded
from offbeat.stages.recorded_update import counts_on_device
from offbeat.stages.slots import Slot
from offbeat.stages.stage import Stage
from offbeat.transport.memory import Memory

CPU = torch.device("cpu")
real_check = checks.check_streams
ENGINES: tuple[Any, ...] = ("serial", "streams")


class PretendedLane:
    """Runs everything at once, in the order in which it is queued."""

    def __init__(self, device: torch.device) -> None:
        del device
        self.stage: Stage | None = None
        self.recorded = 0
        self.replayed = 0
        self._seed = 0
        self.inside = False
        self._pools: dict[object, WeakSet[PretendedRecording]] = {}
        self._used: set[object] = set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        yield
        self.inside = before

    @contextmanager
    def from_caller(self) -> Iterator[None]:
        yield

    def now(self) -> PretendedInstant:
        return PretendedInstant(perf_counter())

    def wait(self, instant: object) -> None: ...

    def wait_for_caller(self) -> None: ...

    def caller_waits(self) -> None: ...

    def seed(self, seed: int) -> None:
        self._seed = seed

    def drew(self) -> bool:
        return True

    def pool(self) -> object:
        return object()

    def record(self, function: Callable[[], Any], pool: object = None) -> tuple[Any, Any]:
        assert self.stage is not None
        uses = self._pools.setdefault(pool, WeakSet())
        assert pool is None or uses or pool not in self._used, "CUDA frees a pool with its last use"
        self._used.add(pool)
        before = [(t, t.detach().clone()) for t in self._state(self.stage)]
        with seeded(0, CPU):
            result = function()
        for tensor, values in before:
            tensor.data.copy_(values)
        self.recorded += 1
        recording = PretendedRecording(self, function, result)
        uses.add(recording)
        return recording, result

    @staticmethod
    def _state(stage: Stage) -> list[Tensor]:
        """Everything a recorded operation writes, which recording must leave as it was."""
        found: list[Tensor] = []
        for module in stage.modules:
            found += [*module.parameters(), *module.buffers()]
        for optimizer in stage.optimizers:
            found += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        found += stage.corrector.tensors()
        gathered = runner_of(stage).gathered
        for places in (gathered.newest, gathered.sums):
            found += [place for place in places or () if place is not None]
        return found


class PretendedInstant(float):
    @property
    def event(self) -> PretendedInstant:
        return self

    def synchronize(self) -> None: ...

    def seconds_after(self, earlier: float) -> float:
        return self - earlier

    def __sub__(self, other: float) -> PretendedInstant:
        return PretendedInstant(float(self) - other)


class PretendedRecording:
    def __init__(self, lane: PretendedLane, function: Callable[[], Any], result: Any) -> None:
        self._lane = lane
        self._function = function
        self._places = nest.tensors(result)
        self._built_in = self._numbers()
        assert lane.stage is not None
        modules = [module for root in lane.stage.modules for module in root.modules()]
        self._attributes = [(m, _attributes_of(m), dict(m._forward_hooks)) for m in modules]

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Python does not run again, so nothing that was changed since is seen."""
        now = [(m, _attributes_of(m), dict(m._forward_hooks)) for m, *_ in self._attributes]
        _put_back(self._attributes)
        yield
        _put_back(now)

    def _numbers(self) -> Any:
        """What a real recording has built in: an update's lag, momentum, rate, and addresses; the
        factor on a loss's gradient, unless it is read from memory.
        """
        slot = getattr(self._function, "__self__", None)
        if isinstance(slot, Slot) and self._function == slot.run_backward:
            work = slot._takeoff
            return work.scale if work.scale_at is None else None
        stage = self._lane.stage
        assert stage is not None
        if self._function != runner_of(stage).show_and_step:
            return None
        settings = [g for o in stage.optimizers for g in o.param_groups]
        numbers = [{k: v for k, v in group.items() if k != "params"} for group in settings]
        remembered = [
            t.data_ptr() for t in (*stage.corrector.tensors(), *(stage.corrector._before or ()))
        ]
        lag = stage.flights.lag(stage.version) if stage.corrector.active else None
        return lag, numbers, remembered

    def replay(self) -> None:
        stage = self._lane.stage
        assert stage is not None
        assert self._numbers() == self._built_in
        with seeded(self._lane._seed, CPU), torch.enable_grad(), self._as_recorded():
            result = self._function()
        for place, value in zip(self._places, nest.tensors(result), strict=True):
            place.data.copy_(value.detach())
        self._lane.replayed += 1


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _put_back(attributes: Any) -> None:
    for module, values, hooks in attributes:
        for name in _attributes_of(module).keys() - values.keys():
            del vars(module)[name]
        vars(module).update(values)
        module._forward_hooks.clear()
        module._forward_hooks.update(hooks)


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "Lane", PretendedLane)
    monkeypatch.setattr(transport, "LaneMemory", lambda _: Memory())
    clock = staticmethod(lambda: PretendedInstant(perf_counter()))
    monkeypatch.setattr(streams.Streams, "clock", clock)
    monkeypatch.setattr(checks, "check_streams", lambda *_: None)
    build = Recorded.__init__

    def init(self: Recorded, stage: Stage, lanes: Lanes) -> None:
        build(self, stage, lanes)
        for lane in (lanes.forward, lanes.backward):
            lane.stage = stage  # type: ignore[attr-defined]

    monkeypatch.setattr(Recorded, "__init__", init)


def runner_of(stage: Stage) -> Recorded:
    assert isinstance(stage.runner, Recorded)
    return stage.runner


def stages_of(trainer: offbeat.Trainer) -> list[Stage]:
    return [worker.stage for worker in trainer._engine.workers]


def runners_of(trainer: offbeat.Trainer) -> list[Recorded]:
    return [runner_of(stage) for stage in stages_of(trainer)]


def replays(runner: Recorded) -> int:
    lanes: Any = runner.lanes
    return int(lanes.forward.replayed + lanes.backward.replayed)


def compare(model: nn.Sequential, batches: Any, method: Any, **settings: Any) -> offbeat.Trainer:
    """Trains with both engines, compares everything and returns the one with streams."""
    serial = trained(model, batches, method, **settings)
    ours = trained(model, batches, method, engine="streams", **settings)
    assert_same_bits(ours.state_dict(), serial.state_dict())
    for stage in range(serial.stages):
        assert ours.ledger.lags(stage) == serial.ledger.lags(stage)
    assert ours.ledger.losses(serial.stages - 1) == serial.ledger.losses(serial.stages - 1)
    return ours


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_method_gives_the_serial_bits(method: Any) -> None:
    trainer = compare(cnn(), image_batches(24, rows=8), method(), cuts=[3, 6])
    if method.name != "pipedream-2bw":
        assert all(replays(runner) > 20 for runner in runners_of(trainer))


@pytest.mark.parametrize(
    "method",
    [
        StaleWeights(),
        StaleWeights(backward="stash", accumulate=2),
        PipeDream(backward="current"),
        PipeDream(accumulate=4),
        ADL(accumulate=3),
        DSP(),
    ],
    ids=str,
)
def test_rules_accumulation_clipping_and_short_batches(method: Any) -> None:
    """Micro-batches of two sizes, and a short batch that never comes again."""
    compare(cnn(), image_batches(20, rows=13, last_rows=7), method, cuts=[3, 6], clip=0.5)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (StaleWeights(), {}),
        (PipeDream(), {}),
        (PipeDream(), {"corrections": [Predict()]}),
        (ADL(accumulate=3), {}),
        (DSP(), {}),
        (DSP(accumulate=2), {}),
    ],
    ids=str,
)
def test_a_penalty_is_recorded_with_the_part_that_brings_it(method: Any, settings: Any) -> None:
    def penalty(named: Any) -> Any:
        return 1e-2 * sum(p.square().sum() for _, p in named)

    how: dict[str, Any] = {"cuts": [3, 6], **settings}
    ours = compare(cnn(), image_batches(24, rows=12), method, penalty=penalty, **how)
    assert all(replays(runner) > 20 for runner in runners_of(ours))
    without = trained(cnn(), image_batches(24, rows=12), method, **how)
    for name, value in ours.state_dict().items():
        assert not value.is_floating_point() or not torch.equal(value, without.state_dict()[name])


def test_a_part_that_counts_nothing_cannot_bring_a_penalty() -> None:
    x, y = image_batches(1, rows=9)[0]
    y[:3] = -100
    trainer = trainer_for(
        cnn(), ADL(accumulate=3), cuts=[3], engine="streams",
        penalty=lambda named: sum(p.square().sum() for _, p in named),
        weight=lambda x, y: (y != -100).sum(),
    )  # fmt: skip
    with pytest.raises(StageError, match="counts nothing, and it brings the penalty.*serial"):
        trainer.step(x, y)


@pytest.mark.parametrize("method", [m for m in RESUMED_METHODS if not isinstance(m, DGL)], ids=str)
def test_weights_of_several_stages_give_the_serial_bits(method: Any) -> None:
    batches = vector_batches(16, rows=24, dtype=torch.float32)  # all parts in whole vectors
    trainer = compare(tied_net(), batches, method, cuts=[2, 5])
    if not isinstance(method, PipeDream2BW | Phases):
        assert all(replays(runner) > 10 for runner in runners_of(trainer))


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.name)
def test_corrections_give_the_serial_bits(correction: Any) -> None:
    method = StaleWeights() if correction.name == "rewind" else PipeDream(accumulate=2)
    made = correction(times=3.0) if correction.name == "clip-per-stage" else correction()
    compare(cnn(), image_batches(20, rows=8), method, cuts=[3, 6], corrections=[made])


@pytest.mark.parametrize(
    ("correction", "recorded"),
    [
        (SpikeCompensation(), True),
        (Extrapolate(), True),
        (RateByLag(), True),
        (Predict(), True),
        (RateByLag(anneal=30), False),  # another rate with every update
        (GapAware(), False),  # reads the weights that a forward has seen, now here, now there
    ],
    ids=str,
)
def test_a_corrected_update_is_recorded_unless_it_changes(correction: Any, recorded: bool) -> None:
    trainer = trainer_for(
        cnn(), PipeDream(), cuts=[3, 6], engine="streams", corrections=[correction]
    )
    for x, y in image_batches(12):
        trainer.step(x, y)
    late = [runner for runner, lag in zip(runners_of(trainer), trainer.lags, strict=True) if lag]
    assert [runner.recorded_update.latest is not None for runner in late] == [recorded] * 2


def test_a_correction_with_new_memory_is_recorded_anew() -> None:
    """Phases of one step: all updates are first ones, and alike but for where hooks remember."""
    phases = [(PipeDream(cap=1 + number % 2), 1) for number in range(8)]
    method = Phases(*phases, (PipeDream(cap=1), None))
    compare(cnn(), image_batches(16), method, cuts=[3, 6], corrections=[Extrapolate()])


def test_a_rate_on_the_cpu_that_changes_in_place_is_never_an_older_one() -> None:
    def optimizer(params: Any) -> Any:
        return torch.optim.SGD(params, lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9)

    def scheduler(made: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(made, lambda n: 1 / (1 + n))

    trainer = trainer_for(
        cnn(), PipeDream(), cuts=[3, 6], engine="streams", optimizer=optimizer, scheduler=scheduler
    )
    for x, y in image_batches(12):
        trainer.step(x, y)
    assert all(not runner.recorded_update.latest for runner in runners_of(trainer))


@pytest.mark.parametrize("rule", ["stash", "current", "recompute"])
def test_predicted_weights_are_seen_as_the_rule_says(rule: Any) -> None:
    method = StaleWeights(backward=rule)
    trainer = compare(
        cnn(), image_batches(20), method, cuts=[3, 6], corrections=[Predict(horizon="geometric")]
    )
    assert all(replays(runner) > 10 for runner in runners_of(trainer))


def test_an_optimizer_that_counts_on_the_cpu_is_stepped_unrecorded() -> None:
    with pytest.warns(UserWarning, match="AdamW counts its steps on the CPU.*capturable=True"):
        compare(
            cnn(), image_batches(12), StaleWeights(), optimizer=OPTIMIZERS["adamw"], cuts=[3, 6]
        )


def test_numbers_that_change_are_never_those_of_an_older_recording() -> None:
    """A learning rate that stays for a while, then changes with every update."""

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 if n < 10 else 1 / n)

    with pytest.warns(UserWarning, match="change with every update.*tensor on the device"):
        trainer = compare(
            cnn(), image_batches(45), StaleWeights(), scheduler=scheduler, cuts=[3, 6]
        )
    assert all(not runner.recorded_update.latest for runner in runners_of(trainer))


@pytest.mark.parametrize(
    "method",
    [ADL(accumulate=2), PipeDream(accumulate=4), *(DSP(accumulate=2, backward=r) for r in RULES)],
    ids=str,
)
@pytest.mark.parametrize("empty", [False, True])
def test_what_a_part_counts_is_read_by_a_recording_not_built_in(method: Any, empty: bool) -> None:
    """Another number with every part, from one recording; a part that counts nothing among them."""
    batches = padded_batches(16)
    for _, y in batches[5::3] if empty else ():
        y.tensor_split(method.accumulate)[1][:] = -100
    settings = {"cuts": [1, 3], "loss": token_loss, "weight": counted_tokens}
    trainer = compare(token_net(), batches, method, **settings)
    for runner in runners_of(trainer):
        assert len(runner.free) == 1
        assert replays(runner) > 20


def test_a_checkpoint_of_streams_has_the_share_of_each_part_in_flight(tmp_path: Path) -> None:
    batches = padded_batches(14)
    ends = []
    for engine in ("streams", "serial"):
        first = weighted_trainer(ADL(2), cuts=[1, 3], engine="streams")
        for x, y in batches[:7]:
            first.step(x, y)
        first.save(tmp_path / engine, wait=True)
        second = weighted_trainer(ADL(2), cuts=[1, 3], engine=engine)
        second.resume(tmp_path / engine)
        for trainer in (first, second):
            for x, y in batches[7:]:
                trainer.step(x, y)
            trainer.flush()
            ends.append(trainer.state_dict())
    for end in ends[1:]:
        assert_same_bits(end, ends[0])


def test_dropout_draws_the_serial_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.3), nn.ReLU(),
        nn.Linear(16, 4),
    ).double()  # fmt: skip
    for method in (StaleWeights(), DSP()):
        compare(model, vector_batches(20), method, cuts=[3, 6], seed=5)


def double(layer: Any, x: Tensor) -> Tensor:
    result: Tensor = 2 * type(layer).forward(layer, x)
    return result


CHANGED: dict[str, Any] = {
    "a number": lambda layer: setattr(layer, "scale", 0.5),
    "a number of the settings": lambda layer: layer.settings.update(power=2),
    "a branch": lambda layer: setattr(layer, "sharp", True),
    "a forward": lambda layer: setattr(layer, "forward", MethodType(double, layer)),
    "a drop rate": lambda layer: setattr(layer.drop, "p", 0.5),
    "a mode": lambda layer: layer.drop.eval(),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.1)
        self.scale, self.sharp, self.settings = 1.0, False, {"power": 1}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.linear(x)) ** self.settings["power"] * self.scale
        return torch.relu(hidden) if self.sharp else hidden


@pytest.mark.parametrize("rule", ["stash", "current", "recompute"])
@pytest.mark.parametrize("name", CHANGED)
def test_what_a_script_changes_is_recorded_anew(name: str, rule: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(3)), nn.Linear(6, 4)).double()
    results = []
    for engine in ENGINES:
        method = StaleWeights(backward=rule)
        trainer = trainer_for(model, method, cuts=[1, 2, 3], engine=engine, seed=2)
        for number, (x, y) in enumerate(vector_batches(26)):
            if number == 13:
                if engine == "streams":
                    before = [replays(runner) for runner in runners_of(trainer)]
                CHANGED[name](trainer.model.get_submodule("1"))
            trainer.step(x, y)
        trainer.flush()
        results.append((trainer.state_dict(), trainer.ledger.losses(3)))
    assert results[1][1] == results[0][1]
    assert_same_bits(results[1][0], results[0][0])
    for runner, earlier in zip(runners_of(trainer), before, strict=True):
        assert earlier > 5 and replays(runner) > earlier + 5


def test_activation_checkpoints_run_unrecorded() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(), nn.Linear(6, 4)).double()
    with pytest.warns(UserWarning, match="stage 1 runs unrecorded.*activation checkpoints"):
        trainer = compare(model, vector_batches(20), PipeDream(), cuts=[1, 2], seed=5)
    assert [runner.records for runner in runners_of(trainer)] == [True, False, True]


def run(trainer: offbeat.Trainer, steps: int) -> None:
    for x, y in vector_batches(steps):
        trainer.step(x, y)


def test_hooks_and_attributes_that_a_forward_changes_are_no_business_of_recordings() -> None:
    seen = []

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Counts(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)).double()
    trainer = trainer_for(model, PipeDream(), cuts=[1, 2], engine="streams")
    counts, layer, _ = trainer.model.children()
    for words in ("stage 0 .*attribute 0.calls", "stage 1 .*the hook .*lambda.* on '1'"):
        with pytest.warns(UserWarning, match=words):
            run(trainer, 8)
        hook = layer.register_forward_hook(lambda _, __, output: seen.append(output))
    hook.remove()
    assert len(seen) == 8
    assert counts.calls == 16


def test_draws_of_python_are_never_those_of_a_recording() -> None:
    class Draws(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * random.random()

    torch.manual_seed(0)
    model = nn.Sequential(Draws(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    with pytest.warns(
        UserWarning, match="stage 0 runs unrecorded.*Python or NumPy.*only the CPU does"
    ):
        compare(model, vector_batches(12), StaleWeights(), cuts=[1, 2])


def test_phases_evaluation_and_flushes_between() -> None:
    method = Phases((StaleWeights(), 8), (PipeDream(), 8), (Synchronous(), None))
    results = []
    for engine in ENGINES:
        trainer = trainer_for(cnn(), method, cuts=[3, 6], engine=engine)
        scores = []
        for number, (x, y) in enumerate(image_batches(30)):
            trainer.step(x, y)
            if number % 7 == 6:
                scores.append(trainer.evaluate([(x, y)]))
            if number == 12:
                trainer.flush()
        trainer.flush()
        results.append((scores, trainer.state_dict(), trainer.ledger.losses(2)))
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    assert_same_bits(results[1][1], results[0][1])


def test_weights_that_were_loaded_are_the_ones_that_are_trained() -> None:
    batches = image_batches(24)
    start = cnn(seed=3).state_dict()
    results = []
    for engine in ENGINES:
        trainer = trainer_for(cnn(), PipeDream(), cuts=[3, 6], engine=engine)
        for x, y in batches[:12]:
            trainer.step(x, y)
        trainer.flush()
        trainer.load_state_dict(start)
        for x, y in batches[12:]:
            trainer.step(x, y)
        trainer.flush()
        results.append(trainer.state_dict())
    assert_same_bits(results[1], results[0])


def test_what_cannot_be_recorded_runs_unrecorded_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = PretendedLane.record

    def fail_in_stage_1(lane: PretendedLane, function: Any, pool: Any = None) -> Any:
        assert lane.stage is not None
        if lane.stage.index == 1 and function.__name__ == "run_forward":
            raise NotRecordable("'x.item()' (model.py, line 7): operation not permitted")
        return record(lane, function, pool)

    monkeypatch.setattr(PretendedLane, "record", fail_in_stage_1)
    with pytest.warns(
        UserWarning, match=r"stage 1 runs unrecorded.*'x.item\(\)' \(model.py, line 7"
    ):
        trainer = compare(cnn(), image_batches(20), PipeDream(), cuts=[3, 6])
    assert [runner.records for runner in runners_of(trainer)] == [True, False, True]


def test_a_weight_without_a_gradient_now_and_then_is_refused() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual = nn.Linear(6, 6)
            self.rare = nn.Linear(6, 6)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            used = self.usual(x)
            return used if self.calls == 1 else torch.tanh(self.rare(used))

    model = nn.Sequential(Sometimes(), nn.Linear(6, 4))
    trainer = trainer_for(model, PipeDream(), cuts=[1], engine="streams")
    with pytest.raises(StageError, match="rare.weight has a gradient in some batches and none"):
        for x, y in vector_batches(8, dtype=torch.float32):
            trainer.step(x, y)


def test_memory_counts_what_slots_hold() -> None:
    trainer = trainer_for(mlp(), PipeDream(), cuts=[2, 4], engine="streams")
    for x, y in vector_batches(20):
        trainer.step(x, y)
    serial = trainer_for(mlp(), PipeDream(), cuts=[2, 4])
    for x, y in vector_batches(20):
        serial.step(x, y)
    ours, theirs = trainer.memory(), serial.memory()
    assert [m.graphs for m in ours] == [m.graphs for m in theirs] == [2, 1, 0]
    assert [m.in_flight_bytes for m in ours] == [m.in_flight_bytes for m in theirs]


def test_every_kind_of_batch_has_slots_of_its_own() -> None:
    sizes = [6, 4, 6, 4, 6, 4, 6, 4, 6, 4, 6, 4, 6, 4, 6, 4]
    batches = [(x[:rows], y[:rows]) for rows, (x, y) in zip(sizes, image_batches(16), strict=True)]
    trainer = compare(cnn(), batches, StaleWeights(), cuts=[3, 6])
    assert all(len(runner.free) == 2 for runner in runners_of(trainer))


def test_too_many_kinds_are_named() -> None:
    sizes = [2, 3, 4, 5, 6] * 4
    batches = [(x[:rows], y[:rows]) for rows, (x, y) in zip(sizes, image_batches(20), strict=True)]
    with pytest.warns(UserWarning, match="batches of 4 different shapes.*drop_last=True"):
        compare(cnn(), batches, StaleWeights(), cuts=[5])


def test_a_slot_more_lets_forwards_run_ahead_under_accumulation() -> None:
    trainer = compare(mlp(), vector_batches(20, rows=8), PipeDream(accumulate=4), cuts=[2, 4])
    stage = stages_of(trainer)[0]
    runner = runner_of(stage)
    assert runner.back is not runner.lane
    assert sum(map(len, runner.free.values())) == stage.flights.peak + 1


# ------------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("stages", [1, 2])
def test_asking_for_it_without_a_gpu_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="CUDA GPU.*the model is on cpu.*engine='serial'"):
        trainer_for(mlp(), StaleWeights(), stages=stages, engine="streams")


def test_replicas_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="replicas=2.*one GPU trains one"):
        real_check(torch.device("cuda"), 2, AllReduce(), None)


def test_guards_that_put_weights_elsewhere_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="nonfinite='skip'.*nonfinite='stop'"):
        real_check(torch.device("cuda"), 1, None, Guards(nonfinite="skip"))


def test_guards_that_look_stop_and_name() -> None:
    trainer = trainer_for(
        mlp(), StaleWeights(), cuts=[2, 4], engine="streams", guards=Guards(nonfinite="stop")
    )
    batches = vector_batches(20)
    batches[15][0][0, 0] = float("nan")
    with pytest.raises(GuardError, match="the loss of batch 15 is nan"):
        for x, y in batches:
            trainer.step(x, y)
    assert len(trainer.updates) > 30


def test_more_stages_than_queues_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with pytest.warns(UserWarning, match="9 stages share 8 hardware queues.*MAX_CONNECTIONS=32"):
        found = streams.Streams(9, CPU)
    assert all(one is other for one, other, _ in found.lanes)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert all(one is not other for one, other, _ in streams.Streams(9, CPU).lanes)


# ------------------------------------------------------------------------- optimizers


def test_muon_with_a_rate_on_the_device_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the orthogonalisation: it multiplies in bfloat16, which not every CPU can."""
    monkeypatch.setattr(
        torch.optim._muon, "_zeropower_via_newtonschulz", lambda update, *_: update.bfloat16()
    )
    states = []
    for make, rate in ((torch.optim.Muon, 0.02), (Muon, 0.02), (Muon, torch.tensor(0.02).double())):
        weight = nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 7)
        optimizer = make([weight], lr=rate, weight_decay=0.1)  # type: ignore[arg-type]
        for number in range(4):
            weight.grad = torch.cos(weight.detach() * (number + 1))
            optimizer.step()
        states.append(weight.detach())
    assert torch.equal(states[0], states[1])
    torch.testing.assert_close(states[2], states[0], rtol=1e-6, atol=0.0)


def test_optimizers_of_the_command_line_can_be_recorded() -> None:
    for name in ("sgd", "adam", "adamw", "muon"):
        experiment = Experiment.read({"optimizer": name, "engine": "streams", "lr": 0.01})
        made = optimizer_factory(experiment)([nn.Parameter(torch.ones(2, 2))])
        for optimizer in made if isinstance(made, list) else [made]:
            assert counts_on_device(optimizer)
            assert torch.is_tensor(optimizer.param_groups[0]["lr"])


# ------------------------------------------------------------------ checkpoints

SAVED_AT, ENDS_AT = 13, 22
"""By then stages replay; after it a fresh trainer has time to record again."""


def interrupted(
    folder: Path, build: Callable[[Any], offbeat.Trainer], model: str, engines: tuple[Any, Any]
) -> tuple[offbeat.Trainer, offbeat.Trainer]:
    """A run that was resumed, and the one that was saved and went on, both at their end."""
    _, batches = job_of(model, steps=ENDS_AT)
    whole = build(engines[0])
    for x, y in batches[:SAVED_AT]:
        whole.step(x, y)
    whole.save(folder)
    theirs = go_on(whole, batches[SAVED_AT:])
    whole.finish_saving()
    again = build(engines[1])
    assert again.resume(folder).step == SAVED_AT
    assert go_on(again, batches[SAVED_AT:]) == theirs
    return again, whole


unrecorded_updates = pytest.mark.filterwarnings("ignore:updates run unrecorded")


@unrecorded_updates
@pytest.mark.parametrize("method", RESUMED_METHODS, ids=str)
@pytest.mark.parametrize("model", ["cnn", "dropout"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, method: Any, model: str) -> None:
    def build(engine: Any) -> offbeat.Trainer:
        return fresh(model, method, stages=3, engine=engine)

    again, whole = interrupted(tmp_path, build, model, ("streams", "streams"))
    assert_same_bits(again.state_dict(), whole.state_dict())
    assert reading(again) == reading(whole)


@pytest.mark.parametrize("engines", [("serial", "streams"), ("streams", "serial")], ids=str)
@pytest.mark.parametrize(
    "method", [PipeDream(), StaleWeights(), DSP(), ADL(accumulate=3)], ids=lambda m: m.name
)
def test_exact_checkpoints_pass_between_engines(
    tmp_path: Path, method: Any, engines: tuple[Any, Any]
) -> None:
    def penalty(named: Any) -> Any:
        return 1e-2 * sum(p.square().sum() for _, p in named)

    def build(engine: Any) -> offbeat.Trainer:
        return trainer_for(cnn(), method, cuts=[3, 6], engine=engine, penalty=penalty)

    again, whole = interrupted(tmp_path, build, "cnn", engines)
    assert_same_bits(again.state_dict(), whole.state_dict())
    ours = again if engines[1] == "streams" else whole
    assert all(runner.recorded_update.latest for runner in runners_of(ours))


def test_graphs_are_put_back_in_the_stage_s_own_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd would go back on the stream they were built on, which a capture cannot follow."""
    trainers = [trainer_for(cnn(), PipeDream(), cuts=[3, 6], engine="streams") for _ in range(2)]
    for x, y in image_batches(5):
        trainers[0].step(x, y)
    trainers[0].save(tmp_path, wait=True)
    run, inside = Network.run, []

    def watched(network: Network, *arguments: Any) -> Any:
        lane: Any = runners_of(trainers[1])[network.index].lane
        inside.append(lane.inside)
        return run(network, *arguments)

    monkeypatch.setattr(Network, "run", watched)
    trainers[1].resume(tmp_path)
    assert len(inside) == 3
    assert all(inside)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("method", [PipeDream(), ADL(accumulate=3)], ids=lambda m: m.name)
def test_a_trainer_that_has_run_can_resume(tmp_path: Path, method: Any, steps: int) -> None:
    """Nothing that was recorded, or seen, before counts for the state that comes back."""
    batches = image_batches(20, rows=6)

    def build(engine: Any) -> offbeat.Trainer:
        return trainer_for(cnn(), method, cuts=[3, 6], engine=engine)

    whole, ours = build("serial"), build("streams")
    for x, y in batches[:steps]:
        whole.step(x, y)
        ours.step(x, y)
    ours.save(tmp_path, wait=True)
    for x, y in batches[steps:]:
        whole.step(x, y)
    for length in (5, 13, 20 - steps):  # back to the same place, again and again
        ours.resume(tmp_path)
        for x, y in batches[steps : steps + length]:
            ours.step(x, y)
    assert_same_bits(ours.state_dict(), whole.state_dict())


@unrecorded_updates
@pytest.mark.parametrize("correction", [Predict(), GapAware(), SpikeCompensation()], ids=str)
def test_corrections_are_resumed(tmp_path: Path, correction: Any) -> None:
    def build(engine: Any) -> offbeat.Trainer:
        return fresh("cnn", ADL(accumulate=3), stages=3, engine=engine, corrections=[correction])

    again, whole = interrupted(tmp_path, build, "cnn", ("streams", "streams"))
    assert_same_bits(again.state_dict(), whole.state_dict())


def test_memory_that_replays_have_written_is_no_change_in_place(tmp_path: Path) -> None:
    trainer = trainer_for(cnn(), StaleWeights(), cuts=[3, 6], engine="streams")
    for x, y in image_batches(SAVED_AT, rows=8):
        trainer.step(x, y)
    for stage in stages_of(trainer):
        for flight in stage.flights.in_air.values():
            for tensor in nest.tensors(flight.note.slot.given):
                tensor.add_(0)  # a pretended replay makes tensors anew, a real one writes to them
    trainer.save(tmp_path, wait=True)


# ------------------------------------------------------------------------- entering streams


class PretendedCuda:
    """Which stream is the current one, and how often that was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = "the caller's"
        self.asked = 0
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    def current_stream(self, device: object = None) -> Any:
        del device
        self.asked += 1
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def test_streams_are_entered_and_left_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendedCuda(monkeypatch)
    seen: list[Any] = []
    with lanes.entered(torch.cuda.current_stream()):
        for name in ("first", "second"):
            with lanes.entered(name):  # type: ignore[arg-type]
                seen.append((cuda.current, lanes.current_stream()))
                with pytest.raises(ZeroDivisionError), lanes.entered("inner"):  # type: ignore[arg-type]
                    assert cuda.current == lanes.current_stream() == "inner"
                    1 / 0  # noqa: B018
                assert cuda.current == lanes.current_stream() == name
            assert cuda.current == lanes.current_stream() == "the caller's"
    assert seen == [("first", "first"), ("second", "second")]
    assert cuda.asked == 1
    cuda.current = "another"
    assert lanes.current_stream() == "another"  # outside nothing is taken for granted


class PretendedGraph:
    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_while_cuda_records(
    monkeypatch: pytest.MonkeyPatch, collecting: bool, fails: bool
) -> None:
    """A trainer that was dropped is garbage with recordings, and CUDA forbids to destroy these."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(lanes.Lane, "_own_random_numbers", lambda _: nullcontext())
    monkeypatch.setattr(lanes.Lane, "_abandon", lambda *_: None)
    lane = object.__new__(lanes.Lane)
    destroyed: list[str] = []
    by_the_end: list[list[str]] = []

    class DroppedTrainer:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            destroyed.append("a recording")

    def launch() -> None:
        DroppedTrainer()
        made: list[Any] = [
            [] for _ in range(10 * gc.get_threshold()[0])
        ]  # more than sets off a collection
        by_the_end.append(list(destroyed))
        if fails:
            raise RuntimeError(f"not permitted, as the {len(made)}th")

    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(NotRecordable) if fails else nullcontext():
            lane.record(launch, pool="any")
        assert by_the_end == [[]]
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


class LossOnTheGpu:
    """Can be sent to the host and nothing else."""

    is_cuda = True
    dtype = torch.float64

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> LossOnTheGpu:
        return self


class Landing:
    """A place on the host in which a value is once somebody has waited for it."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.under_way: dict[int, float] = {}
        self.dtype = torch.float64

    def __getitem__(self, place: int) -> Any:
        landing = self

        class Place:
            def copy_(self, loss: LossOnTheGpu, non_blocking: bool) -> Place:
                assert non_blocking
                landing.values.pop(place, None)
                landing.under_way[place] = loss.value
                return self

            def __float__(self) -> float:
                return landing.values[place]

        return Place()


def test_losses_reach_the_ledger_in_small_portions_and_without_asking_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was asked for in one go left the GPU without work once in 170 steps of eight stages."""
    landing, portions = Landing(), []
    made: list[dict[str, Any]] = []

    def memory(count: int, **settings: Any) -> Landing:
        made.append({"count": count} | settings)
        return landing

    class Sent(PretendedInstant):
        def synchronize(self) -> None:
            landing.values |= landing.under_way
            landing.under_way.clear()

    monkeypatch.setattr(streams, "mark", lambda: Sent(perf_counter()))
    monkeypatch.setattr(streams, "_UNSETTLED", 40)
    monkeypatch.setattr(streams, "_AT_ONCE", 10)
    monkeypatch.setattr(torch, "empty", memory)
    ledger = Ledger()
    late = streams.LateLedger(ledger, PretendedLane(CPU))  # type: ignore[arg-type]
    for batch in range(200):
        before = len(ledger)
        now = PretendedInstant(perf_counter())
        loss = LossOnTheGpu(batch / 7) if batch % 2 else None
        late.record("F", batch % 2, batch, 0, now, now, loss, 0)
        portions.append(len(ledger) - before)
    assert max(portions) == 10
    assert 160 < sum(portions) <= 170  # the newest are left to the GPU
    late.settle()
    assert [row.loss for row in ledger if row.batch % 2] == [n / 7 for n in range(1, 200, 2)]
    assert [row.batch for row in ledger] == list(range(200))
    assert made == [{"count": 40, "dtype": torch.float64, "pin_memory": True}]
