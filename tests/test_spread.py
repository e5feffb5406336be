"""Models larger than a process: built on meta, read stage by stage, saved stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
import spread_jobs as jobs
from helpers import OPTIMIZERS, assert_same_bits
from offbeat.checkpoints import save_weights
from offbeat.errors import CheckpointError, ConfigurationError

CASES = [(k, m) for k in ("tied", "tower", "list") for m in jobs.METHODS]


def written(folder: Path, kind: str) -> Any:
    """A model, its weights left in two files and an index, as transformers leaves them."""
    model = jobs.model_of(kind, meta=False)
    state = (model if isinstance(model, nn.Module) else nn.Sequential(*model)).state_dict()
    state.pop("head.weight", None)  # transformers leaves out the second name of a weight
    (folder / kind).mkdir()
    where: dict[str, str] = {}
    for number, names in enumerate((list(state)[::2], list(state)[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_weights({name: state[name] for name in names}, folder / kind / file)
        where |= dict.fromkeys(names, file)
    words = {"metadata": {}, "weight_map": where}
    (folder / kind / "model.safetensors.index.json").write_text(json.dumps(words))
    return model


def whole_run(kind: str, method: str) -> tuple[list[float], dict[str, Any]]:
    trainer = jobs.trainer_of(kind, method, meta=False)
    return jobs.losses_of(trainer, jobs.batches_of(kind)), trainer.state_dict()


def assert_written(folder: Path, kind: str, method: str) -> None:
    """The files of a run hold the bits of one in which the model was built whole."""
    _, state = whole_run(kind, method)
    found = jobs.whole_weights(folder / f"{kind}-{method}")
    assert found.keys() <= state.keys()
    assert {*state} - {*found} <= {"head.weight"}
    assert_same_bits(found, {name: state[name] for name in found})


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_in_one_process_the_bits_are_those_of_a_model_built_whole(
    kind: str, method: str, tmp_path: Path
) -> None:
    written(tmp_path, kind)
    losses, state = whole_run(kind, method)
    trainer = jobs.trainer_of(kind, method, meta=True)
    trainer.load_state_dict(tmp_path / kind)
    assert jobs.losses_of(trainer, jobs.batches_of(kind)) == losses
    assert_same_bits(trainer.state_dict(), state)
    assert_same_bits(trainer.gather().state_dict(), state)


@pytest.mark.timeout(240)
def test_in_three_processes_too_and_after_going_on_from_a_checkpoint(tmp_path: Path) -> None:
    cases = [("tied", "synchronous"), ("tied", "pipedream"), ("tower", "pipedream")]
    for kind in ("tied", "tower"):
        written(tmp_path, kind)
    for found in offbeat.launch(jobs.all_cases, 3, str(tmp_path), cases, timeout_s=220):
        for kind, method in cases:
            losses, _ = whole_run(kind, method)
            assert found[f"{kind} {method}"] == losses
            assert found[f"{kind} {method} resumed"] == losses
    for kind, method in cases:
        assert_written(tmp_path, kind, method)
        index = json.loads(
            (tmp_path / f"{kind}-{method}" / "model.safetensors.index.json").read_text()
        )
        assert len({*index["weight_map"].values()}) == 3
    # Whoever begins from these files begins where the run has ended.
    trainer = jobs.trainer_of("tied", "pipedream", meta=True)
    trainer.load_state_dict(tmp_path / "tied-pipedream")
    jobs.losses_of(trainer, jobs.batches_of("tied")[:1])


@pytest.mark.timeout(120)
def test_a_process_says_what_it_does_not_have(tmp_path: Path) -> None:
    written(tmp_path, "tied")
    for said in offbeat.launch(
        jobs.train_and_say, 2, str(tmp_path), "tied", "pipedream", timeout_s=100
    ):
        assert "trainer.load_state_dict(folder)" in said["before"]
        assert "nothing says what its weights are" in said["unread"]
        assert "trainer.save_pretrained(folder)" in said["gather"]
        assert "trainer.save_pretrained(folder)" in said["state_dict"]
        assert "trainer.save_pretrained(folder)" in said["drained"]
        assert "no process has all of a model that was built on meta" in said["read"]


def test_what_cannot_be_built_from_meta_is_refused_in_words(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = jobs.Tied()
    with pytest.raises(ConfigurationError, match=r"'blocks\.0\.table'.*model\.blocks\.0\.table ="):
        offbeat.Trainer(model, loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["momentum"])
    trainer = jobs.trainer_of("tied", "synchronous", meta=True)
    with pytest.raises(ConfigurationError, match="nothing says what its weights are"):
        trainer.step(*jobs.batches_of("tied")[0])
    written(tmp_path, "tower")
    with pytest.raises(ConfigurationError, match="'embedding.weight' is missing in the state"):
        trainer.load_state_dict(tmp_path / "tower")
    with pytest.raises(CheckpointError, match="holds neither model.safetensors nor"):
        trainer.load_state_dict(tmp_path)
    index = tmp_path / "tower" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"inlet.weight": "../other"}}')
    with pytest.raises(CheckpointError, match="is no index of safetensors"):
        trainer.load_state_dict(tmp_path / "tower")
