"""Monitors: what they read is what the formulas say, and reading changes nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import jobs
import offbeat
from helpers import assert_same_bits, cnn, image_batches, mlp, trained, trainer_for, vector_batches
from offbeat.app.cli import main
from offbeat.corrections import Monitor, Predict, SpikeCompensation
from offbeat.errors import ConfigurationError
from offbeat.methods import ADL, DGL, Method, PipeDream, StaleWeights, Synchronous
from offbeat.records.readings import Readings

WATCHED: dict[str, Any] = {"monitor": Monitor(every=1, probe=True)}


class Recorder(torch.optim.SGD):
    """Remembers every gradient it was given and all weights after its steps."""

    all: ClassVar[list[Recorder]] = []

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.gradients: list[Tensor] = []
        self.weights = [self.flat()]
        Recorder.all.append(self)

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.param_groups[0]["params"]]).clone()

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([p.grad.reshape(-1) for p in parameters]).clone())
        super().step(closure)
        self.weights.append(self.flat())


@pytest.mark.parametrize("parts", [1, 4])
def test_staleness_is_rate_times_curvature_times_lag(parts: int) -> None:
    """The lag is that of an update's parts on average: with four of them not all are late."""
    Recorder.all = []
    method = PipeDream(accumulate=parts)
    trainer = trainer_for(
        mlp(), method, lambda p: Recorder(p, lr=0.05, momentum=0.9), cuts=[2, 4], **WATCHED
    )
    for x, y in vector_batches(12):
        trainer.step(x, y)
    assert not trainer.readings.of("staleness", 2)
    for stage in (0, 1):
        seen = Recorder.all[stage]
        lags = trainer.ledger.lags(stage)
        change = moved = 0.0
        expected = {}
        for t in range(1, len(seen.gradients)):
            g = (seen.gradients[t] - seen.gradients[t - 1]).square().sum().item()
            d = (seen.weights[t] - seen.weights[t - 1]).square().sum().item()
            change, moved = 0.9 * change + 0.1 * g, 0.9 * moved + 0.1 * d
            late = sum(lags[part] for part in range(t * parts, (t + 1) * parts)) / parts
            expected[t + 1] = 0.05 / 0.1 * (change / moved) ** 0.5 * late
        assert late == {1: (2, 1), 4: (0.5, 0.25)}[parts][stage]
        found = trainer.readings.of("staleness", stage)
        assert list(found) == list(expected)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-9)


@pytest.mark.parametrize("rate", [0.005, 0.02])
def test_staleness_of_a_quadratic_is_known(rate: float) -> None:
    """Curvature 3: eta / (1 - m) x 3 x lag, to a few per cent while weights move slowly."""
    trainer = offbeat.Trainer(
        [nn.Linear(4, 4, bias=False), nn.Identity(), nn.Identity()],
        loss=lambda output, _: 1.5 * output.square().sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.5),
        method=PipeDream(),
        monitor=Monitor(every=1),
    )
    for _ in range(60):
        trainer.step(torch.eye(4), torch.zeros(4))
    last = list(trainer.readings.of("staleness", 0).values())[-1]
    assert last == pytest.approx(rate / 0.5 * 3 * 2, rel=0.2)


def test_staleness_of_adam_is_in_its_own_units() -> None:
    """Adam's steps do not depend on the loss's scale, and so the number must not either."""
    found = []
    for scale in (1.0, 100.0):
        trainer = trained(
            mlp(), vector_batches(9), PipeDream(), lambda p: torch.optim.AdamW(p, lr=0.01),
            cuts=[2], loss=lambda a, y, s=scale: s * nn.functional.cross_entropy(a, y),
            monitor=Monitor(every=1),
        )  # fmt: skip
        found.append(list(trainer.readings.of("staleness", 0).values()))
    assert len(found[0]) > 3
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize(("horizon", "error"), [("lag", 0.0), (1.5, 0.25), (4.0, 1.0)])
def test_a_prediction_s_error_is_a_share_of_the_way(horizon: Any, error: float) -> None:
    """A constant gradient: the weights go 2 steps in a lag of 2, a horizon of T says T."""
    trainer = offbeat.Trainer(
        [nn.Linear(3, 3, bias=False), nn.Identity(), nn.Identity()],
        loss=lambda output, _: output.sum(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5),
        method=PipeDream(),
        corrections=[Predict(horizon=horizon)],
        monitor=Monitor(every=1),
    )
    for _ in range(150):
        trainer.step(torch.eye(3), torch.zeros(3))
    assert list(trainer.readings.of("prediction", 0).values())[-1] == pytest.approx(error, abs=1e-3)


@pytest.mark.parametrize("method", [PipeDream(), StaleWeights(), PipeDream(accumulate=4)], ids=str)
def test_cosines_compare_the_points_in_use(method: Method) -> None:
    """By hand: after n steps stage k applies next what it read m_k updates ago."""
    Recorder.all = []
    trainer = trainer_for(
        mlp(), method, lambda p: Recorder(p, lr=0.3, momentum=0.9), cuts=[2, 4], **WATCHED
    )
    for x, y in vector_batches(9):
        trainer.step(x, y)
    found = trainer.probe(*vector_batches(1)[0])
    network = mlp()
    stages = [network[a:b] for a, b in pairwise([0, 2, 4, 7])]
    gradients = []
    for stale in (False, True):
        for stage, seen, lag in zip(stages, Recorder.all, trainer.lags, strict=True):
            version = len(seen.weights) - 1
            values = seen.weights[version - lag if stale else version]
            nn.utils.vector_to_parameters(values.clone(), stage.parameters())
        x, y = vector_batches(1)[0]
        loss = nn.functional.cross_entropy(network(x), y)
        gradients.append(
            [
                torch.cat([g.reshape(-1) for g in torch.autograd.grad(
                    loss, list(stage.parameters()), retain_graph=True)])
                for stage in stages
            ]
        )  # fmt: skip
    for k in range(3):
        expected = torch.cosine_similarity(gradients[0][k], gradients[1][k], dim=0)
        assert found[k] == pytest.approx(expected.item(), abs=1e-9)
    assert found[0] < (0.999 if trainer.lags[0] > 1 else 0.9999)
    assert [r.value for r in trainer.readings if r.what == "cosine" and r.stage == 0] == [found[0]]


def test_after_a_drain_nothing_is_stale_and_nothing_is_read_twice() -> None:
    trainer = trained(mlp(), vector_batches(6), PipeDream(), cuts=[2, 4], **WATCHED)
    for x, y in vector_batches(6):
        trainer.step(x, y)
    read = [(r.what, r.stage, r.version) for r in trainer.readings]
    assert len(read) == len(set(read))
    trainer.flush()
    assert trainer.probe(*vector_batches(1)[0]) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})


@pytest.mark.filterwarnings("ignore:.*no stage lags")
@pytest.mark.parametrize("method", [PipeDream(), ADL(2), StaleWeights(), Synchronous()], ids=str)
def test_watching_changes_no_bit(method: Method) -> None:
    results = []
    for settings in ({}, WATCHED):
        trainer = trainer_for(
            jobs.dropout_net(), method, cuts=[3, 6], seed=1,
            corrections=[Predict(), SpikeCompensation()], **settings,
        )  # fmt: skip
        for x, y in vector_batches(8, dtype=torch.float32):
            trainer.step(x, y)
            if settings:
                trainer.probe(x, y)
        trainer.flush()
        results.append(trainer.state_dict())
    assert_same_bits(*results)


def test_a_probe_leaves_statistics_alone() -> None:
    trainer = trained(cnn(), image_batches(5), PipeDream(), cuts=[3, 5], **WATCHED)
    before = trainer.state_dict()
    trainer.probe(*image_batches(1)[0])
    assert_same_bits(trainer.state_dict(), before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("processes", [3, 2])
def test_every_process_reads_the_same(processes: int) -> None:
    alone = jobs.watch(3)
    assert {what for what, *_ in alone["readings"]} == {"staleness", "prediction", "cosine"}
    for ours in offbeat.launch(jobs.watch, processes, 3, timeout_s=100):
        assert ours == alone


def test_readings_are_saved_and_loaded(tmp_path: Path) -> None:
    readings = Readings()
    readings.record("staleness", 0, 1, 10, 0.25)
    readings.record("cosine", 2, 0, 11, -0.5)
    readings.save(tmp_path / "readings.jsonl")
    for other in (
        Readings.load(tmp_path / "readings.jsonl"),
        Readings.from_bytes(readings.to_bytes()),
    ):
        assert list(other) == list(readings)
    (tmp_path / "bad").write_text('{"what": "mood"}\n')
    with pytest.raises(ConfigurationError, match="line 1: not a reading"):
        Readings.load(tmp_path / "bad")


def test_a_run_stores_what_its_monitor_read(tmp_path: Path) -> None:
    line = "train --method pipedream --stages 3 --epochs 2 --monitor --correction predict"
    with pytest.raises(SystemExit) as left:
        main([*line.split(), "--out", str(tmp_path / "run")])
    assert not left.value.code
    readings = Readings.load(tmp_path / "run" / "readings.jsonl")
    assert {r.what for r in readings} == {"staleness", "prediction", "cosine"}
    assert len(readings.of("cosine", 0)) == 2
    assert len(readings.of("staleness", 0)) == 4  # 46 steps, lag 2, every 10 updates
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["monitor"] is True
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "run")])
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "How stale" in page
    assert "cosine" in page


@pytest.mark.parametrize(
    ("method", "monitor", "words"),
    [
        (PipeDream(), Monitor(), "monitor=Monitor"),
        (PipeDream(), None, r"Trainer\(monitor=Monitor\(probe=True\)\)"),
        (DGL(), Monitor(probe=True), "nothing stale to compare"),
    ],
)
def test_a_probe_that_cannot_be_answered_is_refused(
    method: Method, monitor: Any, words: str
) -> None:
    trainer = trainer_for(mlp(), method, cuts=[2], monitor=monitor)
    with pytest.raises(ConfigurationError, match=words):
        trainer.probe(*vector_batches(1)[0])


def test_a_monitor_must_be_one() -> None:
    with pytest.raises(ConfigurationError, match="monitor=True: give Monitor"):
        trainer_for(mlp(), PipeDream(), cuts=[2], monitor=True)
    with pytest.raises(ConfigurationError, match="every=0"):
        Monitor(every=0)


def test_stages_of_mixed_types_and_frozen_ones_are_watched() -> None:
    torch.manual_seed(0)
    mixed = nn.Sequential(nn.LayerNorm(6, dtype=torch.bfloat16), Widening(), nn.Linear(6, 6))
    embedding = nn.Embedding(9, 6, dtype=torch.bfloat16).requires_grad_(False)
    trainer = trainer_for(
        [embedding, mixed, nn.Linear(6, 4)], PipeDream(),
        lambda p: torch.optim.AdamW([{"params": p}, {"params": [], "weight_decay": 0.0}]),
        corrections=[Predict(horizon="fitted")], **WATCHED,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        x, y = torch.randint(9, (8,), generator=generator), torch.randint(4, (8,))
        trainer.step(x, y)
    assert set(trainer.probe(x, y)) == {1, 2}
    trainer.step(x, y)
    assert {reading.stage for reading in trainer.readings if reading.what == "staleness"} == {1}


def test_a_probe_leaves_out_what_was_frozen_meanwhile() -> None:
    """The first weight of a stage: what it read must not be taken for that of the next."""
    found = []
    for frozen in (False, True):
        trainer = trainer_for(mlp(), PipeDream(), cuts=[2, 4], **WATCHED)
        for x, y in vector_batches(6):
            trainer.step(x, y)
        for parameter in trainer.model.parameters():
            if frozen and parameter.dim() == 2:
                parameter.requires_grad_(False)
        point = trainer._engine.workers[0].stage.corrector.stale_weights()
        assert point is not None
        assert all(weights.shape == p.shape for p, weights in point.items())
        found.append(trainer.probe(*vector_batches(1)[0]))
    assert list(found[1]) == [0, 1, 2]
    assert found[1] != found[0]
    assert all(-1 <= cosine <= 1 for cosine in found[1].values())


class Widening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_a_probe_passes_through_a_stage_that_begins_in_place() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)
    trainer = trainer_for(
        nn.Sequential(*layers).double(), PipeDream(), cuts=[1], monitor=Monitor(probe=True)
    )
    batches = vector_batches(5)
    for x, y in batches:
        trainer.step(x, y)
    assert all(-1 <= cosine <= 1 for cosine in trainer.probe(*batches[0]).values())


def test_readings_say_what_they_hold_and_that_a_name_is_wrong() -> None:
    readings = Readings()
    assert repr(readings) == "Readings(none)"
    readings.record("cosine", 0, 0, 1, 0.5)
    assert repr(readings) == "Readings(cosine: 1)"
    with pytest.raises(ConfigurationError, match="unknown reading 'cosines'. Did you mean 'cosi"):
        readings.of("cosines", 0)  # type: ignore[arg-type]
