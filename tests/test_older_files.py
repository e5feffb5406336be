"""Files that an older version wrote: they load and mean the same, or are refused with a way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import older_jobs
from offbeat.app import cli
from offbeat.app.runs import Run
from offbeat.checkpoints.folder import MANIFEST
from offbeat.errors import OffbeatError

SAMPLES = Path(__file__).parent / "older"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text())
FACTS = sorted(
    {
        (kind, name)
        for kind in ("drained", "exact")
        for name in json.loads((SAMPLES / kind / "step-000005" / MANIFEST).read_text())
    }
)


def assert_went_on(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """As the older version did, up to what another processor rounds otherwise."""
    for name, values in expected["weights"].items():
        ours, theirs = (
            torch.tensor(v, dtype=torch.float64) for v in (found["weights"][name], values)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=name)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-12)


def test_a_drained_checkpoint_of_an_older_version_is_gone_on_from(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / "drained", tmp_path / "drained")
    trainer = older_jobs.trainer()
    resumed = trainer.resume(folder)
    assert (resumed.step, resumed.kind, resumed.skipped) == (older_jobs.SAVED_AT, "drained", ())
    assert_went_on(older_jobs.go_on(trainer), EXPECTED["drained"])


def test_the_comparison_would_see_lost_momentum(tmp_path: Path) -> None:
    trainer = older_jobs.trainer()
    weights = SAMPLES / "drained" / "step-000005" / "model.pt"
    trainer.load_state_dict(torch.load(weights, weights_only=True))
    with pytest.raises(AssertionError):
        assert_went_on(older_jobs.go_on(trainer), EXPECTED["drained"])


def test_an_exact_checkpoint_of_an_older_version_loads_or_is_refused_with_a_way_out(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(SAMPLES / "exact", tmp_path / "exact")
    trainer = older_jobs.trainer()
    refusal = ""
    try:
        trainer.resume(folder)
    except OffbeatError as error:
        refusal = str(error)
    if refusal:
        assert "drain=True" in refusal
        assert "version" in refusal
    else:
        assert_went_on(older_jobs.go_on(trainer), EXPECTED["exact"])


@pytest.mark.parametrize(("kind", "fact"), FACTS)
def test_a_fact_that_an_older_manifest_lacks_is_answered_in_words(
    tmp_path: Path, kind: str, fact: str
) -> None:
    folder = shutil.copytree(SAMPLES / kind, tmp_path / kind)
    file = folder / "step-000005" / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest[fact]
    file.write_text(json.dumps(manifest))
    trainer = older_jobs.trainer()
    refusal = ""
    try:
        trainer.resume(folder)
    except OffbeatError as error:
        refusal = str(error)
    if refusal:
        assert fact in refusal or f"{MANIFEST} cannot be read" in refusal
    else:
        assert_went_on(older_jobs.go_on(trainer), EXPECTED[kind])


def test_a_run_of_an_older_version_is_reported(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / "run", tmp_path / "run")
    run = Run.load(folder)
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 12)
    page = tmp_path / "page"
    for words in (["report", str(folder), "--out", str(page)],
                  ["timeline", "--measured", str(folder / "ledger.jsonl")]):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert not ended.value.code
    html = next(page.glob("*.html")).read_text()
    assert "stale-weights" in html or "StaleWeights" in html
    assert "</html>" in html
