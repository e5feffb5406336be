"""What people are used to: mappings as batches, metrics, predictions, wrappers, one rank alone."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from habit_jobs import (
    Encoding,
    accuracy,
    ask_alone,
    encodings,
    groups_by_name,
    speaker,
    train_and_look,
    trainer_of,
)
from helpers import OPTIMIZERS, mlp, vector_batches
from offbeat.errors import BatchError, ConfigurationError


def logits_of(model: nn.Module, batch: Encoding) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, use_cache=False)["logits"]  # type: ignore[no-any-return]


def test_a_mapping_is_a_batch_and_predictions_are_those_of_the_model() -> None:
    found = train_and_look()
    assert found["losses"][0] is None and len(found["owed"]) == 1
    for batch, output in zip(encodings(2), found["before"], strict=True):
        assert type(output) is dict and torch.equal(output["logits"], logits_of(speaker(), batch))
    model = speaker()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = trainer_of(model_two := speaker(), method="synchronous")
    for batch in encodings():
        loss = model(**batch, use_cache=False)["loss"]
        assert float(trainer.step(batch)) == float(loss.detach())  # type: ignore[arg-type]
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    (output,) = trainer.predict([encodings(1)[0]])
    assert torch.equal(output["logits"], logits_of(model, encodings(1)[0]))
    assert torch.equal(output["logits"], logits_of(model_two, encodings(1)[0]))


def test_metrics_see_all_batches_as_one() -> None:
    trainer = trainer_of(model := speaker(), method="synchronous")
    batches = [encodings(1, rows=4)[0], encodings(2, rows=1)[1]]
    found = trainer.evaluate(batches, metrics={"accuracy": accuracy, "rows": lambda o, y: len(y)})
    hits = [(logits_of(model, b).argmax(-1) == b["labels"]).float() for b in batches]
    assert found.metrics == {"accuracy": float(torch.cat(hits).mean()), "rows": 5.0}
    with pytest.raises(ConfigurationError, match="metrics={'words': ...} returned a str"):
        trainer.evaluate(batches, metrics={"words": lambda o, y: "many"})
    with pytest.raises(ConfigurationError, match="give functions by name"):
        trainer.evaluate(batches, metrics={"accuracy": 3})  # type: ignore[dict-item]
    longer = Encoding(input_ids=torch.zeros(2, 7).long(), labels=torch.zeros(2, 7).long())
    with pytest.raises(BatchError, match="differ beyond their rows"):
        trainer.evaluate([*batches, longer], metrics={"accuracy": accuracy})
    pairs = vector_batches(3)
    plain = offbeat.Trainer(
        mlp(), loss=nn.functional.cross_entropy, optimizer=OPTIMIZERS["sgd"], cuts=[2]
    )
    result = plain.evaluate(
        pairs, metrics={"hits": lambda o, y: (o.argmax(1) == y).double().mean()}
    )
    assert result.metrics["hits"] == pytest.approx(result.accuracy)
    assert [output.shape for output in plain.predict(x for x, _ in pairs)] == [(6, 4)] * 3


@pytest.mark.parametrize(("processes", "settings"), [(2, {}), (2, {"replicas": 2, "stages": 2})])
def test_processes_evaluate_and_predict_what_one_does(
    processes: int, settings: dict[str, Any]
) -> None:
    expected = train_and_look(**settings)
    for found in offbeat.launch(Look(settings), processes):
        assert found["found"] == expected["found"]
        for what in ("before", "after"):
            pairs = zip(found[what], expected[what], strict=True)
            assert all(torch.equal(one["logits"], other["logits"]) for one, other in pairs)
        if "replicas" not in settings:
            assert found["losses"] == expected["losses"] and found["owed"] == expected["owed"]


class Look:
    """Can be sent to other processes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def __call__(self) -> dict[str, Any]:
        return train_and_look(**self.settings)


@pytest.mark.parametrize(("asked", "then"), [("state_dict", "step"), ("memory", "end")])
def test_a_rank_that_asks_alone_is_told_at_once(asked: str, then: str) -> None:
    with pytest.raises(offbeat.OffbeatError) as told:
        offbeat.launch(Alone(asked, then), 2)
    words = str(told.value)
    assert "all processes must call the same" in words
    assert ("rank 1 has ended" if then == "end" else "rank 1 is in step()") in words


class Alone:
    def __init__(self, asked: str, then: str) -> None:
        self.what = asked, then

    def __call__(self) -> None:
        took, words = ask_alone(*self.what)
        assert took < 4.0, f"{took:.1f} s: {words}"  # two, and as much again on a busy machine
        raise_words(words)


def raise_words(words: str) -> None:
    if words:
        raise offbeat.OffbeatError(words)


def test_parameter_groups_by_name_reach_every_replica() -> None:
    state = groups_by_name(replicas=2)
    first = speaker().state_dict()
    for name, value in state.items():
        assert torch.equal(value, first[name]) == name.endswith("bias"), name


def test_unknown_keys_are_named_and_the_batch_is_not_started() -> None:
    trainer = trainer_of(speaker())
    strange = Encoding(encodings(1)[0], special_tokens_mask=torch.zeros(4, 5))
    with pytest.raises(BatchError, match="Speaker has no argument 'special_tokens_mask'"):
        trainer.step(strange)
    assert trainer.step(encodings(1)[0]) is None


def test_a_model_left_in_evaluation_mode_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(speaker().eval())
    with caplog.at_level(logging.INFO, "offbeat"):
        trainer.step(encodings(1)[0])
    assert "Speaker is in evaluation mode" in caplog.text and "model.train()" in caplog.text
    caplog.clear()
    trainer_of(speaker()).step(encodings(1)[0])
    assert "evaluation mode" not in caplog.text


def test_wrappers_are_taken_off_or_refused() -> None:
    wrapped: Any = torch.compile(speaker(), backend="eager")
    trainer = trainer_of(wrapped, stages=None, cuts=["blocks.2"])
    trainer.step(encodings(1)[0])
    assert list(trainer.state_dict()) == list(speaker().state_dict())
    with pytest.raises(ConfigurationError, match="wrapped in DataParallel"):
        trainer_of(nn.DataParallel(speaker()))


def test_blocks_inside_a_wrapper_are_found_by_their_own_path() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = speaker()

        def forward(self, input_ids: Any, **others: Any) -> Any:
            return self.base(input_ids, **others)

    trainer = trainer_of(Wrapper(), stages=None, cuts=["blocks.2"])
    assert trainer.cuts == (2,)


def test_sync_batch_norm_between_processes_is_refused_in_a_sentence() -> None:
    from offbeat.engines.guests import refuse_sync_batch_norm

    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(ConfigurationError, match="'0' is a SyncBatchNorm"):
        refuse_sync_batch_norm(model)


def test_a_loss_that_is_a_sum_is_added_over_parts() -> None:
    batches = vector_batches(3)
    results = []
    for method in (offbeat.Synchronous(), offbeat.OneFOneB(micro_batches=2)):
        trainer = offbeat.Trainer(
            mlp(),
            loss=lambda output, y: nn.functional.cross_entropy(output, y, reduction="sum"),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            weight="sum",
            method=method,
            cuts=[2],
        )
        losses = [float(trainer.step(x, y)) for x, y in batches]  # type: ignore[arg-type]
        results.append([*losses, trainer.evaluate(batches).loss])
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    assert results[0][0] > 6 * results[0][3] * 0.9  # a sum over six rows, and a mean


def test_a_model_that_says_which_list_is_its_pipeline_is_asked_first() -> None:
    """What it says is where to look; whether the stages are right is compared all the same."""
    from offbeat.cutting.blocks import BlocksCut
    from offbeat.cutting.cut import Wish

    model: Any = speaker()
    model.extras = nn.ModuleList(nn.Identity() for _ in range(9))
    assert getattr(BlocksCut.plan(Wish(model, stages=2)), "path", None) == "extras"  # the longest
    model.config = SimpleNamespace(base_model_pp_plan={"blocks": (["hidden"], ["hidden"])})
    assert getattr(BlocksCut.plan(Wish(model, stages=2)), "path", None) == "blocks"
    trainer = trainer_of(model)
    trainer.step(encodings(1)[0])
    assert isinstance((trainer.cuts or ("",))[0], int)
