"""A run that has lost a replica, or got one back, is saved like any other."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

import offbeat
import storing_jobs as jobs
from helpers import assert_same_bits
from offbeat.checkpoints import load_weights
from offbeat.errors import ConfigurationError

pytestmark = pytest.mark.timeout(300)  # many processes, perhaps on a busy machine


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.parametrize("dies", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_run_that_has_lost_a_replica_is_saved_and_goes_on_without_it(
    dies: int, tmp_path: Path
) -> None:
    found = offbeat.launch(jobs.store, 3, tmp_path, 3, dies, False, timeout_s=200, go_on=True)
    left = [replica for replica in range(3) if replica != dies]
    assert steps_in(tmp_path / "exact") == [1, jobs.SAVED]
    manifest = tmp_path / f"exact/step-{jobs.SAVED:06}/manifest.json"
    assert json.loads(manifest.read_text())["gone"] == [dies]
    again = offbeat.launch(jobs.go_on, 3, tmp_path / "exact", 3, timeout_s=200, go_on=True)
    assert again[dies] is None
    for replica in left:
        assert again[replica]["step"] == jobs.SAVED
        assert again[replica]["data"] == {"at": jobs.SAVED - 1}
        assert_same_bits(again[replica]["state"], found[replica]["state"])
    weights = load_weights(tmp_path / f"drained/step-{jobs.LAST:06}/model.safetensors")
    assert_same_bits(weights, found[left[0]]["state"])
    with pytest.raises(ConfigurationError, match=f"replica {dies} had died.*'go on' and a process"):
        jobs.build(3).resume(tmp_path / "exact")
    trainer = jobs.build(2)
    assert trainer.resume(tmp_path / "drained").step == jobs.LAST


@pytest.mark.long
def test_a_replica_that_was_gone_when_a_run_was_saved_joins_it_again(tmp_path: Path) -> None:
    assert offbeat.launch(jobs.store, 3, tmp_path, 3, 1, False, timeout_s=200, go_on=True)
    found = offbeat.launch(
        jobs.go_on_until_all_are_back, 3, tmp_path / "exact", 3, timeout_s=200, go_on=True,
        restart=1,
    )  # fmt: skip
    for result in found:
        assert jobs.SAVED < result["joined"] < jobs.LAST
        assert_same_bits(result["state"], found[0]["state"])


@pytest.mark.parametrize("dies", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_run_that_has_got_a_replica_back_is_saved_by_all(dies: int, tmp_path: Path) -> None:
    """The same folder as before the death: the lock has other processes then, and is the run's."""
    found = offbeat.launch(
        jobs.store, 2, tmp_path, 2, dies, True, timeout_s=200, go_on=True, restart=1
    )
    assert jobs.DIES < found[0]["joined"] < jobs.SAVED
    assert steps_in(tmp_path / "exact") == [1, jobs.SAVED]
    manifest = tmp_path / f"exact/step-{jobs.SAVED:06}/manifest.json"
    assert "gone" not in json.loads(manifest.read_text())
    again = offbeat.launch(jobs.go_on, 2, tmp_path / "exact", 2, timeout_s=200, go_on=True)
    with warnings.catch_warnings(action="ignore"):  # of other numbers of threads
        alone = jobs.go_on_alone(tmp_path / "exact", 2)
    for state in (again[0]["state"], again[1]["state"], found[1]["state"], alone):
        assert_same_bits(state, found[0]["state"])
    weights = load_weights(tmp_path / f"drained/step-{jobs.LAST:06}/model.safetensors")
    assert_same_bits(weights, found[0]["state"])
