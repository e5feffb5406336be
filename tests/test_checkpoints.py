"""Checkpoints: a run that is resumed ends with the bits of one that was never disturbed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat
from checkpoint_jobs import (
    AVERAGINGS,
    METHODS,
    STEPS,
    THREE_PHASES,
    Job,
    adamw,
    assert_same_end,
    example_of,
    fit,
    fresh,
    go_on,
    interrupted,
    interrupted_all,
    job_of,
    names_in,
    resume_all,
    save_all,
    stopped,
    unpunctual,
)
from helpers import OPTIMIZERS, assert_same_bits, mlp, trained, trainer_for, vector_batches
from offbeat.averaging import CO2, AllReduce, Averaging, DaSGD
from offbeat.checkpoints import Resumed, load_weights, tensorfile
from offbeat.checkpoints.folder import MANIFEST, Found
from offbeat.corrections import (
    CORRECTIONS,
    GapAware,
    Monitor,
    Predict,
    RateByLag,
    SpikeCompensation,
)
from offbeat.engines.launcher import launch
from offbeat.errors import CheckpointError, ConfigurationError
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    RULES,
    GPipe,
    Method,
    Phases,
    PipeDream,
    StaleWeights,
    Synchronous,
)
from offbeat.records import disk
from offbeat.zoo import data_named
from offbeat.zoo.gpt import gpt

# ------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(("model", "at"), [("cnn", 6), ("dropout", 3)])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, method: Method, model: str, at: int
) -> None:
    ours, theirs = interrupted(tmp_path, model, method, at, stages=3)
    assert_same_end(ours, theirs)


@pytest.mark.parametrize("averaging", AVERAGINGS, ids=str)
def test_averages_under_way_are_kept(tmp_path: Path, averaging: Averaging) -> None:
    for at, method in ((5, StaleWeights()), (7, ADL(accumulate=2))):
        folder = tmp_path / str(at)
        settings: dict[str, Any] = {"stages": 2, "replicas": 2, "averaging": averaging}
        assert_same_end(*interrupted(folder, "dropout", method, at, **settings))


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.name)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_corrections_remember_what_is_in_flight(
    tmp_path: Path, correction: Any, accumulate: int
) -> None:
    corrections = [example_of(correction)]
    methods = [StaleWeights(backward=rule, accumulate=accumulate) for rule in ("stash", "current")]
    method = next(method for method in methods if fit(corrections, method, 3))
    settings = {"stages": 3, "corrections": corrections, "monitor": Monitor(every=2, probe=True)}
    assert_same_end(*interrupted(tmp_path, "dropout", method, 6, **settings))


def test_several_corrections_and_predictions_under_every_rule(tmp_path: Path) -> None:
    for rule in RULES:
        method = PipeDream(backward=rule)
        corrections = [Predict(horizon="fitted"), SpikeCompensation(), RateByLag()]
        settings = {"stages": 3, "corrections": corrections}
        assert_same_end(*interrupted(tmp_path / rule, "cnn", method, 7, **settings))


@pytest.mark.parametrize("policy", ["skip", "roll-back"])
def test_guards_remember_what_they_have_seen(tmp_path: Path, policy: Any) -> None:
    """A gradient that is not finite is on its way when the run is saved."""

    def run(at: int | None) -> offbeat.Trainer:
        network, batches = job_of("cnn")
        batches = [(x.clone(), y) for x, y in batches[:STEPS]]
        batches[5][0][0, 0, 0, 0] = float("nan")
        guards = offbeat.Guards(nonfinite=policy, every=2)
        settings: dict[str, Any] = {"stages": 3, "guards": guards}
        trainer = trainer_for(network, StaleWeights(), **settings)
        for number, (x, y) in enumerate(batches):
            if number == at:
                trainer.save(tmp_path, wait=True)
                trainer = trainer_for(network, StaleWeights(), **settings)
                assert trainer.resume(tmp_path).step == at
            trainer.step(x, y)
        trainer.flush()
        return trainer

    theirs, ours = run(None), run(7)
    assert_same_bits(ours.state_dict(), theirs.state_dict())
    assert list(map(repr, ours.updates)) == list(map(repr, theirs.updates))  # nan is not nan
    assert any(update.outcome != "applied" for update in ours.updates)


@pytest.mark.parametrize("at", range(STEPS))
def test_any_step_will_do(tmp_path: Path, at: int) -> None:
    """Step 0 is before the first batch; the fill, the change of phases and its drain follow."""
    method = Phases((PipeDream(), 5), (StaleWeights(), 3), (Synchronous(), None))
    assert_same_end(*interrupted(tmp_path, "cnn", method, at, cuts=[3, 6], clip=0.5))


def test_processes_resume_with_the_same_bits(tmp_path: Path) -> None:
    one_replica = [
        ("dropout", method, at, {"stages": 2})
        for method, at in (
            (StaleWeights(), 4),
            (ADL(accumulate=3), 5),
            (DSP(), 1),
            (THREE_PHASES, 6),
        )
    ]
    for of_rank in launch(interrupted_all, 2, str(tmp_path / "row"), one_replica, timeout_s=100):
        for ours, theirs in of_rank:
            assert_same_end(ours, theirs)


def test_replicas_in_processes_resume_with_the_same_bits(tmp_path: Path) -> None:
    jobs = [
        ("dropout", StaleWeights(), 6, {"stages": 2, "replicas": 2, "averaging": averaging})
        for averaging in (DaSGD(every=3, delay=2), CO2(3))
    ]
    for of_rank in launch(interrupted_all, 4, str(tmp_path), jobs, timeout_s=100):
        for ours, theirs in of_rank:
            assert_same_end(ours, theirs)


IN_ROWS: list[Job] = [
    ("dropout", DSP(), 3, {"stages": 3}),
    ("cnn", THREE_PHASES, 5, {"stages": 3}),  # with losses owed from the drain in between
    ("dropout", StaleWeights(), 6, {
        "stages": 3, "corrections": [Predict(horizon="fitted")],
        "guards": offbeat.Guards(every=2), "monitor": Monitor(every=2, probe=True),
    }),
]  # fmt: skip
WITH_REPLICAS: list[Job] = [
    ("dropout", method, 5, {"stages": 2, "replicas": 2, "averaging": averaging})
    for method, averaging in (
        (THREE_PHASES, DaSGD(every=3, delay=2)),
        (StaleWeights(), AllReduce(compress="int8")),
    )
]
OF_ALL_METHODS: list[Job] = [
    (("cnn", "dropout")[n % 2], method, 4 + n % 3, {"stages": 3})
    for n, method in enumerate(METHODS)
]
OF_ALL_AVERAGINGS: list[Job] = [
    ("dropout", ADL(2), 5, {"stages": 2, "replicas": 2, "averaging": averaging})
    for averaging in AVERAGINGS
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("jobs", "layouts"),
    [
        pytest.param(IN_ROWS, (1, 2, 3), id="stages"),
        pytest.param(WITH_REPLICAS, (1, 2, 4), id="replicas"),
        pytest.param(OF_ALL_METHODS, (1, 2, 3), id="methods", marks=pytest.mark.long),
        pytest.param(OF_ALL_AVERAGINGS, (1, 2, 4), id="averagings", marks=pytest.mark.long),
    ],
)
def test_what_one_layout_saves_any_other_resumes(
    tmp_path: Path, jobs: list[Job], layouts: tuple[int, ...]
) -> None:
    """So many processes save, and so many others go on, each as if it had not been interrupted."""
    folders = {processes: str(tmp_path / str(processes)) for processes in layouts}
    expected = {n: launch(save_all, n, folders[n], jobs, timeout_s=200) for n in layouts}
    for processes in layouts:
        others = [folder for n, folder in folders.items() if n != processes]
        by_rank = launch(resume_all, processes, others, jobs, timeout_s=200)
        for theirs, found in zip(expected[processes], by_rank, strict=True):
            for of_layout in found:
                for one, other in zip(of_layout, theirs, strict=True):
                    assert_same_end(one, other)


def test_whoever_is_early_waits_until_all_have_cleared_up(tmp_path: Path) -> None:
    ours, theirs = launch(unpunctual, 2, str(tmp_path), timeout_s=60)
    assert ours == theirs and ours


def test_after_an_error_processes_are_told_to_start_again() -> None:
    for words in launch(stopped, 2, timeout_s=60):
        assert words.endswith("Start the processes again, and resume() from a checkpoint.")
    assert stopped().endswith("Go on from a state with load_state_dict(), or build a new Trainer.")


@pytest.mark.parametrize("settings", [{"corrections": [GapAware()]}, {"monitor": Monitor()}])
@pytest.mark.parametrize("before", ["first step", "step after loading", "step after resuming"])
def test_a_checkpoint_from_before_a_fill_can_be_resumed(
    tmp_path: Path, before: str, settings: dict[str, Any]
) -> None:
    batches = vector_batches(12)

    def made() -> offbeat.Trainer:
        return trainer_for(mlp(), PipeDream(), adamw, cuts=[2, 4], **settings)

    trainer = made()
    if before != "first step":
        for x, y in batches[:5]:
            trainer.step(x, y)
        trainer.flush()
    if before == "step after loading":
        trainer.load_state_dict(trainer.state_dict())
    elif before == "step after resuming":
        trainer.save(tmp_path / "drained", drain=True, wait=True)
        trainer = made()
        trainer.resume(tmp_path / "drained")
    trainer.save(tmp_path / "exact", wait=True)
    again = made()
    again.resume(tmp_path / "exact")
    for x, y in batches[5:]:
        trainer.step(x, y)
        again.step(x, y)
    trainer.flush()
    again.flush()
    assert_same_bits(again.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("phases", [
    [(PipeDream(), 5), (StaleWeights(), None)],
    [(PipeDream(), 5), (Synchronous(), 3), (PipeDream(), None)],
    [(PipeDream(), None)],
])  # fmt: skip
def test_what_corrections_remember_goes_no_further_than_their_phase(
    tmp_path: Path, phases: Any
) -> None:
    """Drained twice: what was taken back and not yet used is not lost either."""
    batches = vector_batches(14)
    trainers = [
        trainer_for(mlp(), Phases(*phases), adamw, cuts=[2, 4], corrections=[GapAware()])
        for _ in range(3)
    ]
    for x, y in batches[:5]:
        trainers[0].step(x, y)
    trainers[0].save(tmp_path / "once", drain=True, wait=True)
    trainers[1].resume(tmp_path / "once")
    trainers[1].save(tmp_path / "twice", drain=True, wait=True)
    trainers[2].resume(tmp_path / "twice")
    for trainer in trainers:
        for x, y in batches[5:]:
            trainer.step(x, y)
        trainer.flush()
    assert_same_bits(trainers[1].state_dict(), trainers[0].state_dict())
    assert_same_bits(trainers[2].state_dict(), trainers[0].state_dict())


def test_a_drained_checkpoint_of_fresh_optimizers_makes_them_fresh(tmp_path: Path) -> None:
    batches = vector_batches(10)
    trainer = trainer_for(mlp(), cuts=[2, 4])
    trainer.save(tmp_path, drain=True, wait=True)
    for x, y in batches[:5]:
        trainer.step(x, y)
    trainer.resume(tmp_path)
    for x, y in batches:
        trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), trained(mlp(), batches, cuts=[2, 4]).state_dict())


def in_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices and vectors, each if there are any, at rates of their own."""
    wanted = [
        {"params": [p for p in params if p.dim() > 1], "lr": 0.1},
        {"params": [p for p in params if p.dim() == 1], "lr": 0.01},
    ]
    return torch.optim.SGD([group for group in wanted if group["params"]], momentum=0.9)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Two phases, as many as a stage may have groups."""
    rates = [10 * group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=20)


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    """Two schedulers and one milestone."""
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), falling(optimizer)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])


@pytest.mark.parametrize("scheduler", [falling, cycle, warmed_up])
@pytest.mark.parametrize("then", [[3], [1, 3], [1, 2, 3]])
def test_schedulers_pass_to_a_cut_with_other_groups(
    tmp_path: Path, then: list[int], scheduler: Any
) -> None:
    def made(cuts: list[int]) -> offbeat.Trainer:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        network = nn.Sequential(*layers)
        return trainer_for(network, Synchronous(), in_groups, cuts=cuts, scheduler=scheduler)

    batches = vector_batches(9, dtype=torch.float32)
    trainer = made([3])
    for x, y in batches[:4]:
        trainer.step(x, y)
    trainer.save(tmp_path, drain=True, wait=True)
    again = made(then)
    again.resume(tmp_path)
    for x, y in batches[4:]:
        trainer.step(x, y)
        again.step(x, y)
    assert_same_bits(again.state_dict(), trainer.state_dict())


def drained_at(
    step: int, made: Callable[[], offbeat.Trainer], batches: Sequence[Any], folder: Path
) -> tuple[offbeat.Trainer, offbeat.Trainer]:
    """A trainer that drains for a checkpoint, and one that goes on from it, both at the end."""
    trainer, again = made(), made()
    for x, y in batches[:step]:
        trainer.step(x, y)
    trainer.save(folder, drain=True, wait=True)
    again.resume(folder)
    for x, y in batches[step:]:
        trainer.step(x, y)
        again.step(x, y)
    return trainer, again


def test_a_head_s_own_group_is_taken_over_with_it(tmp_path: Path) -> None:
    def made() -> offbeat.Trainer:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)
        return trainer_for(nn.Sequential(*layers).double(), DGL(), in_groups, cuts=[1, 3])

    batches = vector_batches(9)
    trainer, again = drained_at(4, made, batches, tmp_path)
    assert_same_bits(again.state_dict(), trainer.state_dict())


def last_first(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A group per weight, those of a head before the others, at rates of their own."""
    groups = [{"params": [p], "lr": 0.1 + 0.01 * p.numel()} for p in params]
    return torch.optim.SGD(groups[::-1], momentum=0.9)


def rates_of(trainer: offbeat.Trainer) -> dict[str, float]:
    """By weight; of a head's weights by their place in its stage."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return {
        names.get(id(p), f"head of {worker.stage.index}: {number}"): group["lr"]
        for worker in trainer._engine.workers
        for number, group in enumerate(worker.stage.optimizers[0].param_groups)
        for p in group["params"]
    }


def test_rates_are_those_of_the_weights_wherever_a_fresh_head_s_groups_lie(tmp_path: Path) -> None:
    def made(cuts: list[int]) -> offbeat.Trainer:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4)
        network = nn.Sequential(*layers).double()
        return trainer_for(network, DGL(), last_first, cuts=cuts, scheduler=falling)

    batches = vector_batches(9)
    trainer, fresh_one = made([2]), made([3])
    for x, y in batches[:4]:
        trainer.step(x, y)
    trainer.save(tmp_path, drain=True, wait=True)
    again = made([3])
    again.resume(tmp_path)
    for x, y in batches[4:]:
        trainer.step(x, y)
        again.step(x, y)
    for x, y in batches:
        fresh_one.step(x, y)
    ours, theirs, heads = rates_of(again), rates_of(trainer), rates_of(fresh_one)
    assert any(name.startswith("head") for name in ours)
    for name, rate in ours.items():  # a fresh head goes by the same clock, from rates of its own
        assert rate == pytest.approx((heads if name.startswith("head") else theirs)[name]), name


def test_sparse_momentum_is_stored_as_well(tmp_path: Path) -> None:
    def made() -> offbeat.Trainer:
        torch.manual_seed(0)
        layers = nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4)
        return trainer_for(
            nn.Sequential(*layers),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            cuts=[2],
        )

    batches = [(torch.randint(9, (6, 2)), torch.randint(4, (6,))) for _ in range(6)]
    trainer, again = drained_at(3, made, batches, tmp_path)
    torch.testing.assert_close(again.state_dict(), trainer.state_dict())
    with pytest.raises(CheckpointError) as found:
        trainer.save(tmp_path / "exact", wait=True)
    words = str(found.value)
    assert "layout torch.sparse_coo cannot be stored" in words
    assert "an optimizer keeps it for sparse gradients, save with drain=True" in words
    assert words.endswith("Training can go on."), "the next save could not store it either"


class Unpicklable(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"of this process": threading.Lock()}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_what_cannot_be_written_is_said_whatever_it_is(tmp_path: Path) -> None:
    trainer = trainer_for(nn.Sequential(Unpicklable(6, 8), nn.Linear(8, 4)).double(), cuts=[1])
    trainer.step(*vector_batches(1)[0])
    with pytest.raises(CheckpointError, match="could not be written.*get_extra_state"):
        trainer.save(tmp_path, drain=True, wait=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written.*Not a directory"):
        trainer_of_a_step().save(tmp_path / "file", wait=True)


def test_a_folder_that_cannot_be_looked_into_any_more_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of_a_step()
    trainer.save(tmp_path, wait=True)
    listed = Path.iterdir

    def locked(self: Path) -> Any:
        if self == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return listed(self)

    monkeypatch.setattr(Path, "iterdir", locked)
    words = r"Permission denied \(.*\)\. Its folder cannot be looked into \(Permission denied\)\."
    with pytest.raises(CheckpointError, match=words):
        trainer.save(tmp_path, wait=True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error. There is no"),
        (OSError("the drive has gone"), "the drive has gone. There is no"),
        (CheckpointError("a lock cannot be stored."), "a lock cannot be stored. There is no"),
    ],
)
def test_trouble_is_told_in_whole_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def trouble(*_: Any) -> None:
        raise error

    monkeypatch.setattr(tensorfile, "write", trouble)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        trainer_of_a_step().save(tmp_path, wait=True)


def trainer_of_a_step() -> offbeat.Trainer:
    trainer = trainer_for(mlp(), cuts=[4])
    trainer.step(*vector_batches(1)[0])
    return trainer


def test_a_place_that_is_no_place_of_checkpoints_is_refused(tmp_path: Path) -> None:
    place = trainer_of_a_step().save(tmp_path / "run" / "checkpoints", wait=True)
    (tmp_path / "file").write_text("")
    for wrong, words in (
        (place, "is a checkpoint itself: give the folder around it, .*checkpoints"),
        (tmp_path / "run", "has its checkpoints in .*run/checkpoints: give that folder"),
        (tmp_path / "file", "is a file: give the folder"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            trainer_for(mlp(), cuts=[4]).resume(wrong)
    assert trainer_for(mlp(), cuts=[4]).resume(tmp_path / "none yet").step == 0


def test_a_checkpoint_is_known_by_any_name_and_other_manifests_are_not_taken_for_one(
    tmp_path: Path,
) -> None:
    (tmp_path / MANIFEST).write_text('{"name": "an app", "files": {}}')
    place = trainer_of_a_step().save(tmp_path, wait=True)
    assert trainer_for(mlp(), cuts=[4]).resume(tmp_path).step == 1
    renamed = place.rename(tmp_path / "best")
    with pytest.raises(ConfigurationError, match="is a checkpoint itself.*call it step-000001 aga"):
        trainer_for(mlp(), cuts=[4]).resume(renamed)


def test_a_trunk_is_cut_as_before(tmp_path: Path) -> None:
    def make() -> offbeat.Trainer:
        torch.manual_seed(0)
        network = gpt(vocabulary=11, width=8, heads=2, layers=4, context=6)
        return offbeat.Trainer(
            network,
            loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
            optimizer=adamw,
            method=StaleWeights(),
            stages=2,
        )

    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(11, (4, 6), generator=generator) for _ in range(9)]
    whole, again = make(), make()
    for n, x in enumerate(tokens):
        if n == 4:
            whole.save(tmp_path, wait=True)
        whole.step(x, x)
    whole.flush()
    assert again.resume(tmp_path).step == 4
    assert again.cuts == whole.cuts
    for x in tokens[4:]:
        again.step(x, x)
    again.flush()
    assert_same_bits(again.state_dict(), whole.state_dict())


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written only after later steps have overwritten all they overwrite."""
    moved_on = threading.Event()
    write = tensorfile.write

    def wait_and_write(path: Path, value: Any) -> Any:
        assert moved_on.wait(60)
        return write(path, value)

    monkeypatch.setattr(tensorfile, "write", wait_and_write)
    for method in (StaleWeights(), PipeDream(), ADL(accumulate=3)):
        moved_on.clear()
        _, batches = job_of("cnn")
        whole = fresh("cnn", method, stages=3)
        folder = tmp_path / type(method).__name__
        for x, y in batches[:5]:
            whole.step(x, y)
        whole.save(folder)
        losses = go_on(whole, batches[5:])
        assert not list(folder.glob("step-*"))
        moved_on.set()
        whole.finish_saving()
        again = fresh("cnn", method, stages=3)
        again.resume(folder)
        assert go_on(again, batches[5:]) == losses
        assert_same_bits(again.state_dict(), whole.state_dict())


def test_generators_and_gradients_of_the_caller_are_put_back(tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]

    trainer = fresh("cnn", ADL(accumulate=3), stages=3)
    _, batches = job_of("cnn")
    for x, y in batches[:4]:
        trainer.step(x, y)
    trainer.save(tmp_path, wait=True)
    expected = drawn()
    drawn()
    again = fresh("cnn", ADL(accumulate=3), stages=3)
    again.resume(tmp_path)
    assert drawn() == expected


# ------------------------------------------------------------------ position in the data


def test_the_position_in_the_data_travels_along(tmp_path: Path) -> None:
    loader = data_named("digits").loader(64, seed=1)
    trainer = trainer_for(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), optimizer=adamw)
    for n, (x, y) in enumerate(loader):
        trainer.step(x, y)
        if n == 4:
            trainer.save(tmp_path, data=loader, wait=True)
            break
    again = trainer_for(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), optimizer=adamw)
    fresh_loader = data_named("digits").loader(64, seed=1)
    start = again.resume(tmp_path, data=fresh_loader)
    assert (fresh_loader.epoch, fresh_loader.position) == (0, 5)
    assert start.data == fresh_loader.state_dict()
    assert start.kind == "exact"


def test_an_empty_folder_is_a_start(tmp_path: Path) -> None:
    trainer = fresh("cnn", StaleWeights(), stages=3)
    start = trainer.resume(tmp_path / "nothing yet")
    assert start == Resumed(step=0, data=None, path=None)
    _, batches = job_of("cnn")
    go_on(trainer, batches[start.step :])


# ------------------------------------------------------------------ what is refused


class _Hidden(torch.autograd.Function):
    """Keeps a tensor as an attribute, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = gradient * ctx.kept
        return found


class _Open(torch.autograd.Function):
    """The same, with a saved tensor and a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = 2
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found: Tensor = gradient * ctx.factor * ctx.saved_tensors[0]
        return found


class _Scaled(nn.Module):
    """Divides by a number that Python takes out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x / float(x.detach().abs().max())


class _ByInput(nn.Module):
    """Branches on a number that is in the data, whatever the weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if float(x.detach().sum()) > 0 else 3.0)


class _Square(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(x)
        return found


def stages_with(odd: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 8), odd, nn.Linear(8, 8)), nn.Linear(8, 4)]


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (_Square(_Hidden), "_HiddenBackward keeps kept as an attribute of its own"),
        (
            _Scaled(),
            "_local_scalar_dense.* takes numbers out of tensors that depend on its weights",
        ),
    ],
)
def test_state_that_hooks_cannot_see_is_refused_with_an_offer_to_drain(
    tmp_path: Path, odd: nn.Module, words: str
) -> None:
    batches = vector_batches(8, dtype=torch.float32)
    trainer = trainer_for(stages_with(odd), StaleWeights(backward="stash"))
    for x, y in batches[:4]:
        trainer.step(x, y)
    with pytest.raises(CheckpointError, match=f"(?s)stage 0: .*{words}.*drain=True"):
        trainer.save(tmp_path)
    trainer.step(*batches[4])  # the run is intact
    trainer.save(tmp_path, drain=True, wait=True)
    again = trainer_for(stages_with(odd), StaleWeights(backward="stash"))
    assert again.resume(tmp_path).kind == "drained"
    for each in (trainer, again):
        for x, y in batches[5:]:
            each.step(x, y)
        each.flush()
    assert_same_bits(again.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("first", [nn.Sequential(nn.Linear(6, 8), _Square(_Open)), _ByInput()])
def test_what_a_second_forward_repeats_is_not_refused(tmp_path: Path, first: nn.Module) -> None:
    torch.manual_seed(0)
    width = 8 if isinstance(first, nn.Sequential) else 6
    stages = [nn.Sequential(first, nn.Linear(width, 8)), nn.Linear(8, 4)]
    batches = vector_batches(8, dtype=torch.float32)
    whole = trainer_for(stages, StaleWeights(backward="stash"))
    again = trainer_for(stages, StaleWeights(backward="stash"))
    for n, (x, y) in enumerate(batches):
        if n == 5:
            whole.save(tmp_path, wait=True)
        whole.step(x, y)
    whole.flush()
    again.resume(tmp_path)
    for x, y in batches[5:]:
        again.step(x, y)
    again.flush()
    assert_same_bits(again.state_dict(), whole.state_dict())


def saved(folder: Path, method: Method = StaleWeights(), **settings: Any) -> offbeat.Trainer:
    trainer = fresh("cnn", method, **({"stages": 3} | settings))
    for x, y in job_of("cnn")[1][:4]:
        trainer.step(x, y)
    trainer.save(folder, wait=True)
    return trainer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": PipeDream()}, "saved with method StaleWeights.* this trainer has PipeDream"),
        ({"stages": 2}, "saved with a number of stages of 3, and this trainer has 2"),
        ({"clip": 0.5}, "saved with clip None, and this trainer has 0.5"),
        ({"replicas": 2}, "saved with a number of replicas of 1, and this trainer has 2"),
        ({"seed": 4}, "saved with seed 3, and this trainer has 4"),
    ],
)
def test_other_settings_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    saved(tmp_path)
    network, _ = job_of("cnn")
    settings: dict[str, Any] = {"method": StaleWeights(), "stages": 3, "seed": 3} | change
    other = trainer_for(network, optimizer=adamw, **settings)
    with pytest.raises(ConfigurationError, match=f"{words}.*drain=True"):
        other.resume(tmp_path)


def test_another_model_or_optimizer_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    wider, _ = job_of("cnn")
    wider[-1] = nn.Linear(96, 7)
    with pytest.raises(
        ConfigurationError, match=r"'9.weight' is float32\[5, 96\] there and float32\[7, 96\] here"
    ):
        trainer_for(wider, StaleWeights(), adamw, stages=3, seed=3).resume(tmp_path)
    network, _ = job_of("cnn")
    with pytest.raises(ConfigurationError, match="state of AdamW for stage 0.* built with SGD"):
        trainer_for(network, StaleWeights(), OPTIMIZERS["sgd"], stages=3, seed=3).resume(tmp_path)
    network[2] = nn.Tanh()
    with pytest.raises(ConfigurationError, match="layers of digest"):
        trainer_for(network, StaleWeights(), adamw, stages=3, seed=3).resume(tmp_path)


def test_another_optimizer_is_refused_as_soon_as_it_is_there(tmp_path: Path) -> None:
    batches = vector_batches(2)
    trained(mlp(), batches, optimizer=adamw, cuts=[4]).save(tmp_path, drain=True, wait=True)
    words = "state of AdamW for '0.weight', and the trainer was built with SGD"
    with pytest.raises(ConfigurationError, match=words):
        trainer_for(mlp(), cuts=[4]).resume(tmp_path)
    by_cost = trainer_for(mlp(), stages=2)  # no stage before the first batch, and no optimizer
    by_cost.resume(tmp_path)
    with pytest.raises(ConfigurationError, match=words):
        by_cost.step(*batches[0])


@pytest.mark.parametrize("drain", [False, True])
def test_rates_come_from_the_checkpoint_and_can_be_changed_then(
    tmp_path: Path, drain: bool
) -> None:
    """As docs/checkpoints.md says: the groups', and where a scheduler makes them its first ones."""
    batches = vector_batches(4)

    def at(rate: float, **settings: Any) -> offbeat.Trainer:
        return trainer_for(
            mlp(), StaleWeights(), lambda params: torch.optim.SGD(params, lr=rate), cuts=[4],
            **settings,
        )  # fmt: skip

    for name, settings in (("plain", {}), ("scheduled", {"scheduler": falling})):
        saved_at = at(0.3, **settings)
        for x, y in batches:
            saved_at.step(x, y)
        saved_at.save(tmp_path / name, drain=drain, wait=True)
        again = at(0.5, **settings)
        again.resume(tmp_path / name)
        assert again.learning_rate == saved_at.learning_rate
        stages = [worker.stage for worker in again._engine.workers]
        for stage in stages:
            if settings:
                stage.schedulers[0].base_lrs = [0.6]
            else:
                stage.optimizers[0].param_groups[0]["lr"] = 0.6
        again.step(*batches[0])
        again.flush()
        rates = [stage.optimizers[0].param_groups[0]["lr"] for stage in stages]
        assert rates == [pytest.approx(0.6 / (1 + s.version) if settings else 0.6) for s in stages]


def test_a_manifest_that_does_not_say_who_held_what_is_refused(tmp_path: Path) -> None:
    save_all(str(tmp_path), [("cnn", DSP(), 3, {"stages": 2})])
    (file,) = tmp_path.glob("*/*/manifest.json")
    manifest, _ = disk.unsealed(file.read_bytes())
    for damaged in ({"placement": 3}, {"placement": [[0]]}, {"placement": None, "processes": 3}):
        disk.write(file, disk.sealed(manifest | damaged))
        with pytest.raises(ConfigurationError, match="does not say which of its processes held"):
            fresh("cnn", DSP(), stages=2).resume(tmp_path / "0")


# ------------------------------------------------------------------ files


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = saved(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for owner, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    again = fresh("cnn", StaleWeights(), stages=3)
    again.resume(tmp_path)
    assert_same_bits(again.state_dict(), whole.state_dict())


def test_a_file_holds_values_as_they_were(tmp_path: Path) -> None:
    base = torch.randn(10, 20)
    long = torch.arange(100_000.0)
    value = {
        "shared": [base, base[3:5], base.t()],
        "parts": [long[100:110], long[99_990:]],
        "odd": [torch.zeros(0, 3), torch.tensor(3.0), torch.ones(1).expand(5)],
        "types": [torch.randn(3).bfloat16(), torch.ones(2, dtype=torch.bool), torch.bfloat16],
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "layout": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "leaf": torch.ones(2, requires_grad=True),
        "plain": (1, None, float("inf"), 1.5, True, "text", b"bytes", {1: 2, "x": [()]}),
        "counter": Counter("aab"),
    }
    file = tmp_path / "value"
    assert tensorfile.write(file, value) == tensorfile.examine(file)
    found = tensorfile.read(file)
    assert file.stat().st_size < 8000, "of a long tensor only the parts in use are written"
    assert found["plain"] == value["plain"]
    assert found["counter"] == value["counter"]
    assert found["types"][2] is torch.bfloat16
    for ours, theirs in zip(_tensors(found), _tensors(value), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert ours.requires_grad == theirs.requires_grad
    storages = {tensor.untyped_storage().data_ptr() for tensor in found["shared"]}
    assert len(storages) == 1
    with pytest.raises(CheckpointError, match="a set cannot be stored"):
        tensorfile.write(file, {1, 2})
    for damage in (b"", b"\xff" * 40, file.read_bytes()[:100]):
        file.write_bytes(damage)
        with pytest.raises(CheckpointError, match="not a file of offbeat's, or it is damaged"):
            tensorfile.read(file)


def _tensors(value: Any) -> list[Tensor]:
    from offbeat import nest

    return nest.tensors(value)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-7] ^= 1
    file.write_bytes(data)


def clear_out(file: Path) -> None:
    file.write_text("")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("replica-0-stage-1.safetensors", truncate, "bytes instead of"),
        ("replica-0-stage-1.safetensors", flip_a_bit, "has been changed or damaged"),
        ("replica-0-stage-1.safetensors", os.remove, "cannot be read"),
        (MANIFEST, clear_out, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    tmp_path: Path, name: str, damage: Any, words: str
) -> None:
    trainer = saved(tmp_path)
    batches = job_of("cnn")[1]
    trainer.step(*batches[4])
    newest = trainer.save(tmp_path, wait=True)
    losses = go_on(trainer, batches[5:])
    damage(newest / name)
    again = fresh("cnn", StaleWeights(), stages=3)
    with pytest.warns(UserWarning, match=f"step-000005 cannot be used: .*{words}"):
        start = again.resume(tmp_path)
    assert start.step == 4
    assert len(start.skipped) == 1
    assert go_on(again, batches[4:])[1:] == losses
    assert_same_bits(again.state_dict(), trainer.state_dict())
    shutil.rmtree(tmp_path / "step-000004")
    with pytest.raises(CheckpointError, match="(?s)none of the 1 checkpoints.*an empty folder"):
        fresh("cnn", StaleWeights(), stages=3).resume(tmp_path)


def test_any_flipped_bit_of_a_manifest_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Everything that decides a resume is under the digest; nothing is taken for another model."""
    trainer = trainer_for(mlp(), Phases((StaleWeights(), 2), (PipeDream(), None)), stages=2)
    batches = vector_batches(6)
    for x, y in batches[:4]:
        trainer.step(x, y)
    trainer.save(tmp_path, drain=True, wait=True)
    trainer.step(*batches[4])
    newest = trainer.save(tmp_path, drain=True, wait=True) / MANIFEST
    sound = newest.read_bytes()
    draw = random.Random(24)
    for count in range(2000):
        place, bit = draw.randrange(len(sound)), draw.randrange(8)
        data = bytearray(sound)
        data[place] ^= 1 << bit
        newest.write_bytes(data)
        found = Found.at(newest.parent, 5)
        assert found.trouble or found.manifest == disk.unsealed(sound)[0], (place, bit)
        if count < 25 or (b'"method"' in sound[max(0, place - 40) : place][-40:] and count < 500):
            again = trainer_for(mlp(), Phases((StaleWeights(), 2), (PipeDream(), None)), stages=2)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                step = again.resume(tmp_path).step
            assert step == (4 if found.trouble else 5)
            assert len(told) == bool(found.trouble)


def test_only_an_undamaged_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = tmp_path / "step-000004" / MANIFEST
    other = trainer_for(mlp(), StaleWeights(), stages=3)
    with pytest.raises(ConfigurationError, match="is of another model"):
        other.resume(tmp_path)
    manifest.write_text(manifest.read_text().replace("float32", "float33", 1))
    with pytest.raises(CheckpointError, match="changed or damaged .its digest differs."):
        other.resume(tmp_path)
    lost = json.loads(manifest.read_text())
    del lost["digest"]
    manifest.write_text(json.dumps(lost))
    with pytest.raises(CheckpointError, match="has lost its digest"):
        other.resume(tmp_path)


def test_a_checkpoint_of_another_format_is_refused_in_words(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "step-000004" / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["digest"]  # which format 1 had not
    file.write_text(json.dumps(manifest | {"format": 1}))
    words = (
        "(?s)step-000004 cannot be used: it has format 1, and this version of offbeat reads 3;"
        " the version that saved it can go on from it.*Give an empty folder to start anew"
    )
    with pytest.raises(CheckpointError, match=words):
        fresh("cnn", StaleWeights(), stages=3).resume(tmp_path)


def test_a_checkpoint_without_its_manifest_does_not_exist(tmp_path: Path) -> None:
    trainer = saved(tmp_path)
    (tmp_path / ".step-000002.partial").mkdir()
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-000009" / "replica-0-stage-0.safetensors").write_text("half")
    again = fresh("cnn", StaleWeights(), stages=3)
    assert again.resume(tmp_path).step == 4
    trainer.step(*job_of("cnn")[1][4])
    trainer.save(tmp_path, wait=True)  # and leftovers go when the next one is complete
    assert names_in(tmp_path) == ["step-000004", "step-000005"]


def test_a_crash_while_one_of_the_same_step_is_replaced_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = saved(tmp_path)
    before = {name: w.clone() for name, w in trainer.state_dict().items()}
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self.name.endswith("4.partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", crash)
        trainer.flush()
        trainer.save(tmp_path, keep=1)
        words = "step 4 could not be written.*newest complete one is .*step-000004.replaced.partial"
        with pytest.raises(CheckpointError, match=words):
            trainer.finish_saving()
    assert not (tmp_path / "step-000004").exists()
    again = fresh("cnn", StaleWeights(), stages=3)
    assert again.resume(tmp_path).step == 4
    assert_same_bits(again.state_dict(), before)
    again.step(*job_of("cnn")[1][4])
    again.save(tmp_path, keep=2, wait=True)
    assert names_in(tmp_path) == [".step-000004.replaced.partial", "step-000005"]
    again.step(*job_of("cnn")[1][5])
    again.save(tmp_path, keep=2, wait=True)
    assert names_in(tmp_path) == ["step-000005", "step-000006"]


def test_a_full_disk_costs_one_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = saved(tmp_path)
    batches = job_of("cnn")[1]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        trainer.step(*batches[4])
        trainer.save(tmp_path)
        words = (
            "step 5 could not be written.*the disk is full.*newest complete one is .*step-000004"
        )
        with pytest.raises(CheckpointError, match=words):
            trainer.finish_saving()
    left = [path for path in tmp_path.rglob("*.safetensors") if "step-000005" in str(path)]
    assert left == [], "the half-written files make room again"
    trainer.save(tmp_path, wait=True)
    assert fresh("cnn", StaleWeights(), stages=3).resume(tmp_path).step == 5


def test_the_newest_are_kept(tmp_path: Path) -> None:
    trainer = saved(tmp_path)
    for x, y in job_of("cnn")[1][4:8]:
        trainer.step(x, y)
        assert trainer.save(tmp_path, keep=2) == trainer.save(tmp_path, keep=2)
    trainer.finish_saving()
    assert names_in(tmp_path) == ["step-000007", "step-000008"]
    manifest = json.loads((tmp_path / "step-000008" / MANIFEST).read_text())
    assert manifest["kind"] == "exact"
    assert manifest["method"].startswith("StaleWeights(")
    assert set(manifest["files"]) == {f"replica-0-stage-{k}.safetensors" for k in range(3)}
    with pytest.raises(ConfigurationError, match="keep=0"):
        trainer.save(tmp_path, keep=0)


def test_a_run_that_did_not_resume_overwrites_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="already holds checkpoints, the newest of step 4"):
        saved(tmp_path)
    assert names_in(tmp_path) == ["step-000004"]


# ------------------------------------------------------------------ drained


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("then", [1, 2, 4])
def test_drained_checkpoints_pass_between_numbers_of_stages(
    tmp_path: Path, stages: int, then: int
) -> None:
    """Without lag the number of stages changes no bit, so neither may a drained checkpoint."""
    batches = vector_batches(10)
    settings: dict[str, Any] = {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)}
    whole = trained(mlp(), batches, optimizer=adamw, **settings)
    first = trainer_for(mlp(), GPipe(1), adamw, stages=stages, **settings)
    for x, y in batches[:5]:
        first.step(x, y)
    first.save(tmp_path, drain=True, wait=True)
    assert_same_bits(
        load_weights(tmp_path / "step-000005" / "model.safetensors"), first.state_dict()
    )
    second = trainer_for(mlp(seed=1), Synchronous(), adamw, stages=then, **settings)
    start = second.resume(tmp_path)
    assert (start.step, start.kind) == (5, "drained")
    for x, y in batches[5:]:
        second.step(x, y)
    second.flush()
    assert_same_bits(second.state_dict(), whole.state_dict())


def test_drained_checkpoints_pass_between_methods_and_replicas(tmp_path: Path) -> None:
    """Losses go on without a jump, and a method goes on from its own as if it had flushed."""
    batches = vector_batches(30, rows=8, dtype=torch.float32)
    make: dict[str, Callable[[], offbeat.Trainer]] = {
        "stale": lambda: fresh("dropout", StaleWeights(), stages=3),
        "adl": lambda: fresh("dropout", ADL(accumulate=2), stages=2),
        "replicas": lambda: fresh("dropout", DSP(), stages=2, replicas=2, averaging=DaSGD(2, 1)),
        "greedy": lambda: fresh("dropout", DGL(), stages=2),
    }
    for name, made in make.items():
        folder = tmp_path / name
        first = made()
        for x, y in batches[:20]:
            first.step(x, y)
        first.save(folder, drain=True, wait=True)
        expected = first.evaluate(batches[:20]).loss
        for other in make.values():
            trainer = other()
            trainer.resume(folder)
            assert trainer.evaluate(batches[:20]).loss == expected
            go_on(trainer, batches[20:])
            assert trainer.evaluate(batches[:20]).loss < expected + 0.02
        again = made()
        again.resume(folder)
        if name != "replicas":  # whose optimizer state is that of the first replica
            assert go_on(again, batches[20:]) == go_on(first, batches[20:])
            assert_same_bits(again.state_dict(), first.state_dict())


def test_every_owed_loss_is_owed_once(tmp_path: Path) -> None:
    batches = vector_batches(12)
    trainer = trainer_for(mlp(), StaleWeights(), stages=3)
    given = []
    for number, (x, y) in enumerate(batches, start=1):
        given.append(trainer.step(x, y))
        if number % 3 == 0:
            trainer.save(tmp_path, drain=True)
    handed_out = [loss for loss in given if loss is not None] + trainer.flush()
    assert len(handed_out) == len(batches)


def test_what_is_saved_with_the_data_is_what_it_was_then(tmp_path: Path) -> None:
    trainer = trained(mlp(), vector_batches(3), stages=2)
    place = {"next": 3, "seen": [0, 1, 2]}
    started = threading.Event()
    write = tensorfile.write

    def late(*arguments: Any, **settings: Any) -> Any:
        started.wait()
        return write(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "write", late)
        trainer.save(tmp_path, data=place)
        place["next"] = 4
        place["seen"].append(3)  # type: ignore[attr-defined]
        started.set()
        trainer.finish_saving()
    again = trainer_for(mlp(), stages=2)
    assert again.resume(tmp_path).data == {"next": 3, "seen": [0, 1, 2]}


def test_a_run_that_changed_without_a_step_is_saved_anew(tmp_path: Path) -> None:
    trainer = trained(mlp(), vector_batches(3), stages=2)
    trainer.save(tmp_path, wait=True)
    trainer.load_state_dict(mlp(seed=5).state_dict())
    trainer.save(tmp_path, data="later", wait=True)
    again = trainer_for(mlp(), stages=2)
    assert again.resume(tmp_path).data == "later"
    assert_same_bits(again.state_dict(), mlp(seed=5).state_dict())
    assert names_in(tmp_path) == ["step-000003"]


def test_a_run_can_go_back_to_an_earlier_phase(tmp_path: Path) -> None:
    batches = vector_batches(12)
    method = Phases((StaleWeights(), 6), (Synchronous(), None))
    trainer = trainer_for(mlp(), method, stages=3)
    for number, (x, y) in enumerate(batches, start=1):
        trainer.step(x, y)
        if number == 5:
            trainer.save(tmp_path, wait=True)
    assert trainer.method.name == "synchronous"
    assert trainer.resume(tmp_path).step == 5
    assert trainer.method.name == "stale-weights"
    go_on(trainer, batches[5:])
    assert_same_bits(trainer.state_dict(), trained(mlp(), batches, method, stages=3).state_dict())


def test_losses_owed_at_a_drained_save_are_not_lost(tmp_path: Path) -> None:
    batches = vector_batches(6)
    trainer, plain = (trainer_for(mlp(), StaleWeights(), stages=3) for _ in range(2))
    losses = [trainer.step(x, y) for x, y in batches[:3]]
    trainer.save(tmp_path, drain=True)
    owed = trainer.flush()
    expected = [plain.step(x, y) for x, y in batches[:3]] + plain.flush()
    assert [loss for loss in [*losses, *owed] if loss is not None] == [
        loss for loss in expected if loss is not None
    ]
