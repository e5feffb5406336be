"""The model of one process under torchrun: whole when asked for by all, else nobody reads it."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gather_jobs as jobs
import offbeat
from helpers import assert_same_bits
from offbeat.engines.models import Elsewhere
from offbeat.errors import ConfigurationError, IncompleteModel

KINDS = ("sequential", "list", "tower", "traced")


def alone(kind: str) -> tuple[nn.Module, offbeat.Trainer]:
    """The same run in one process, of which the whole model is always there."""
    model, batches, how = jobs.model_of(kind)
    trainer = jobs.trainer_of(model, how)
    for x, y in batches:
        trainer.step(x, y)
        assert_same_bits(trainer.model.state_dict(), trainer.state_dict())
    trainer.flush()
    return jobs.whole_of(model), trainer


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("kind", "processes"), [*((kind, 3) for kind in KINDS), ("tower", 2)])
def test_the_model_of_one_process_is_read_once_it_was_gathered(kind: str, processes: int) -> None:
    """Also where a process has several of the stages."""
    found = offbeat.launch(jobs.read_between_steps, processes, kind, timeout_s=200)
    model, _ = alone(kind)
    has_buffers = any(True for _ in model.buffers())
    for of_rank in found:
        assert_same_bits(of_rank["state"], model.state_dict())
        assert_same_bits(of_rank["gathered"], model.state_dict())
        for moment, said in of_rank["said"].items():
            whole = moment in ("start", "gathered")
            for name, words in said.items():
                reads = name in jobs.READS and (has_buffers or name != "all buffers")
                wanted = "" if whole or not reads else "another process trains.*trainer.gather()"
                assert re.search(wanted, words), (moment, name, words)
                assert bool(wanted) == bool(words), (moment, name, words)


def test_a_gathered_model_may_be_wrapped() -> None:
    for said, shape in offbeat.launch(jobs.wrap, 3, timeout_s=100):
        assert "trainer.gather()" in said
        assert shape == [8, 4]


def test_in_one_process_the_model_is_whole_always() -> None:
    model, trainer = alone("tower")
    assert not any(isinstance(p, Elsewhere) for p in model.parameters())
    assert trainer.gather() is trainer.model is model
    assert all(type(p) is nn.Parameter for p in model.parameters())
    again = pickle.loads(pickle.dumps(model))
    assert_same_bits(copy.deepcopy(model).state_dict(), again.state_dict())


def test_before_the_stages_are_made_there_is_nothing_to_gather() -> None:
    model, _, _ = jobs.model_of("sequential")
    trainer = jobs.trainer_of(model, {"stages": 3})
    assert_same_bits(trainer.gather().state_dict(), model.state_dict())


@pytest.mark.timeout(240)
def test_a_state_for_all_is_whole_and_an_exact_checkpoint_is_each_stages_own(
    tmp_path: Path,
) -> None:
    for said in offbeat.launch(jobs.read_after_loading, 3, str(tmp_path), timeout_s=200):
        assert "trainer.gather()" in said["exact"]["state_dict"]
        assert not any(said["drained"].values())
        assert not any(said["exact, loaded"].values())
        assert not any(said["drained, loaded"].values())


def test_what_is_frozen_is_let_go_of_where_it_is_not_used() -> None:
    """It is the same everywhere, and takes as much memory as what is trained."""
    first, second, last = offbeat.launch(jobs.train_frozen, 3, timeout_s=100)
    assert "belongs to stage 1" in first["state_dict"]
    assert "belongs to stage 0" in second["call"]
    assert "belongs to stage 0" in last["call"]


def test_gathered_replicas_are_each_as_it_is_and_state_dict_is_their_mean() -> None:
    found = offbeat.launch(jobs.gather_replicas, 4, timeout_s=100)
    mean = found[0][0]
    for place, (theirs, gathered) in enumerate(found):
        assert_same_bits(theirs, mean)
        assert_same_bits(gathered, found[place // 2 * 2][1])
    first, second = found[0][1], found[2][1]
    weight = "0.weight"
    assert not torch.equal(first[weight], second[weight])
    assert torch.allclose((first[weight] + second[weight]) / 2, mean[weight])


def test_buffers_that_grew_elsewhere_are_gathered() -> None:
    (one, all_of_one), (two, all_of_two), (_, all_of_last) = offbeat.launch(
        jobs.gather_what_grows, 3, timeout_s=100
    )
    assert [len(b) for b in one] == [4, 8]
    for found in (all_of_one, all_of_two, all_of_last):
        assert all(map(torch.equal, found, [*one, *two]))


@pytest.mark.parametrize(
    ("kind", "processes", "replicas"),
    [
        ("own", 1, 1),
        ("own", 2, 1),
        ("own", 4, 2),
        pytest.param("gpt2", 2, 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("default")  # what transformers warns of is its own affair
def test_save_pretrained_writes_what_state_dict_returns(
    kind: str, processes: int, replicas: int, tmp_path: Path
) -> None:
    if kind == "gpt2":
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if processes == 1:
        states = [jobs.save_pretrained(kind, str(tmp_path))]
    else:
        states = offbeat.launch(
            jobs.save_pretrained, processes, kind, str(tmp_path), replicas, timeout_s=100
        )
    written: dict[str, Any]
    if kind == "gpt2":
        written = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / kind).state_dict()
    else:
        written = torch.load(tmp_path / kind / "weights.pt", weights_only=True)
    for state in states:
        assert_same_bits(written, state)


def test_a_model_without_save_pretrained_is_told_what_to_do(tmp_path: Path) -> None:
    _, trainer = alone("tower")
    with pytest.raises(ConfigurationError, match=r"Tower has no save_pretrained.*state_dict\(\)"):
        trainer.save_pretrained(tmp_path / "model")


def test_the_error_is_one_of_ours() -> None:
    assert issubclass(IncompleteModel, offbeat.OffbeatError)
