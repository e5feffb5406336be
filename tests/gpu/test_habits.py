"""Mappings, metrics and predictions are the same whichever engine runs the stages on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from habit_jobs import accuracy, encodings, speaker, trainer_of


def look(engine: str) -> tuple[Any, list[Any], list[float]]:
    batches = [{name: t.cuda() for name, t in batch.items()} for batch in encodings()]
    trainer = trainer_of(speaker().cuda(), engine=engine)
    for batch in batches:
        trainer.step(batch)
    found = trainer.evaluate(batches, metrics={"accuracy": accuracy})
    return found, trainer.predict(batches), [float(loss) for loss in trainer.flush()]


@pytest.mark.filterwarnings("default")  # what a GPU's kernels say is no error here
def test_streams_evaluate_and_predict_what_the_serial_engine_does() -> None:
    (found, outputs, owed), expected = look("streams"), look("serial")
    assert found == expected[0] and owed == expected[2]
    pairs = zip(outputs, expected[1], strict=True)
    assert all(torch.equal(one["logits"], other["logits"]) for one, other in pairs)
