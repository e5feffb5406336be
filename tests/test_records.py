"""Models that are recorded and divided: any sizes, modes and processes, and what cannot be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nets
import offbeat
import test_models
from helpers import OPTIMIZERS, assert_same_bits, vector_batches
from offbeat.cutting.traced import TracedCut
from offbeat.errors import BatchError, ConfigurationError
from offbeat.methods import DSP, GPipe, Method, PipeDream, Synchronous

Batches = list[tuple[Tensor, Tensor]]


def sentences(*sizes: tuple[int, int]) -> Batches:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(32, (rows, length + 1), generator=generator) for rows, length in sizes]
    return [(ids[:, :-1], ids[:, 1:]) for ids in made]


class Reader(nn.Module):
    """Means of what came before, with the embedding again in the end: two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = early = self.embedding(ids)
        for layer in self.first, self.second:
            count = torch.arange(1, ids.size(1) + 1)[:, None]
            hidden = hidden + torch.tanh(layer(hidden.cumsum(1) / count))
        return self.head(hidden + early), {"last": hidden[:, -1], "early": early}


def next_word(output: tuple[Tensor, dict[str, Tensor]], y: Tensor) -> Tensor:
    logits, more = output
    own = more["last"].square().mean() + more["early"].square().mean()
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + own


def trained(
    model: nn.Module, batches: Batches, method: Method | None = None, **settings: Any
) -> offbeat.Trainer:
    trainer = offbeat.Trainer(
        copy.deepcopy(model), loss=settings.pop("loss", F.cross_entropy),
        optimizer=OPTIMIZERS["momentum"], method=method or Synchronous(), **settings,
    )  # fmt: skip
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    assert isinstance(trainer._pipeline.cut, TracedCut)
    return trainer


def plain(
    model: nn.Module,
    batches: Batches,
    loss: Callable[..., Tensor] = F.cross_entropy,
    parts: int = 1,
) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        for part, target in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            share = loss(model(part), target)
            (share * (len(part) / len(x)) if parts > 1 else share).backward()
        optimizer.step()
    return model


SIZES = [(4, 7), (3, 5), (1, 7), (4, 1), (1, 1), (5, 9), (2, 2)]


def test_rows_and_lengths_of_any_size_train_and_evaluate_like_a_plain_loop() -> None:
    batches = sentences(*SIZES)
    trainer = trained(Reader(), batches, loss=next_word, stages=3)
    expected = plain(Reader(), batches, next_word)
    assert_same_bits(trainer.state_dict(), dict(expected.state_dict()))
    expected.eval()
    for sizes in [(4, 7)], [(1, 3), (6, 2)]:
        loader = sentences(*sizes)
        with torch.no_grad():
            losses = [float(next_word(expected(x), y)) * len(x) for x, y in loader]
        mean = sum(losses) / sum(len(x) for x, _ in loader)
        assert trainer.evaluate(loader).loss == pytest.approx(mean, rel=1e-6)
    records = trainer._pipeline.cut.records  # type: ignore[attr-defined]
    assert len(records.known()) <= 6  # and not one for each of ten sizes


def test_micro_batches_of_any_size_train_like_a_plain_loop() -> None:
    batches = sentences((6, 4), (7, 4), (4, 3))
    trainer = trained(Reader(), batches, GPipe(4), loss=next_word, stages=3)
    expected = plain(Reader(), batches, next_word, parts=4)
    assert_same_bits(trainer.state_dict(), dict(expected.state_dict()))


def train_in_sizes(method: Method) -> dict[str, Tensor]:
    trainer = trained(Reader(), sentences(*SIZES[:3]), method, loss=next_word, stages=2)
    trainer.evaluate(sentences((5, 3), (1, 1)))
    trainer.step(*sentences((1, 9))[0])
    return trainer.state_dict()


@pytest.mark.parametrize("method", [PipeDream(), pytest.param(DSP(), marks=pytest.mark.long)])
def test_processes_record_for_themselves_what_comes_later(method: Method) -> None:
    alone = train_in_sizes(method)
    for state in offbeat.launch(train_in_sizes, 2, method):
        assert_same_bits(state, alone)


def test_modes_that_change_are_followed() -> None:
    model = Rough("has statistics")
    batches = vector_batches(6, dtype=torch.float32)

    def train(model: nn.Module, step: Callable[[Tensor, Tensor], Any]) -> None:
        model.train()
        for number, (x, y) in enumerate(batches):
            if number == 3:
                for module in model.modules():
                    module.train(not isinstance(module, nn.BatchNorm1d))
            step(x, y)

    trainer = trained(model, [], cuts=["third"])
    train(trainer.model, trainer.step)
    expected = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](expected.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        optimizer.step()

    train(expected, step)
    assert_same_bits(trainer.state_dict(), dict(expected.state_dict()))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_stages_take_other_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    batches = sentences(*SIZES[:3])
    ours = trained(Reader(), batches, PipeDream(), loss=next_word, stages=2, compile=True)
    theirs = trained(Reader(), batches, PipeDream(), loss=next_word, stages=2)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


# ------------------------------------------------------------------ what a forward may do


class Rough(nn.Module):
    """Three layers, and something in between."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.way = way
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.way == "has statistics":
            x = self.norm(x)
        elif self.way == "assigns a buffer":
            self.mean = 0.9 * self.get_buffer("mean") + 0.1 * x.detach().mean(0)
            x = x - self.mean
        elif self.way == "draws with NumPy":
            x = x * torch.from_numpy(np.random.rand(8).astype("float32"))
        elif self.way == "has a backward of its own":
            x = Straight.apply(x)  # type: ignore[no-untyped-call]
        elif self.way == "checkpoints":
            x = again(self.second, x, use_reentrant=False)
        elif self.way == "checkpoints reentrantly":
            x = again(self.second, x, use_reentrant=True)
        elif self.way == "looks at rows":
            x = x * 2 if len(x) > 4 else x
        elif self.way == "looks at values" and len(x) < 4:
            x = x * 2 if x.sum() > 0 else x
        elif "drop" in self.way and torch.rand([]) < 0.3 * (self.way == "drops layers"):
            return self.third(x)  # type: ignore[no-any-return]
        return self.third(torch.relu(self.second(x)))  # type: ignore[no-any-return]


def again(function: Any, x: Tensor, **settings: Any) -> Tensor:
    output: Tensor = torch.utils.checkpoint.checkpoint(function, x, **settings)
    return output


class Straight(torch.autograd.Function):
    """Rounds, and hands the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    "way", ["assigns a buffer", "checkpoints", "looks at rows", "could drop layers"]
)
def test_what_a_record_can_hold_trains_like_a_plain_loop(way: str) -> None:
    batches = [
        batch for rows in (4, 3, 5, 6) for batch in vector_batches(1, rows, dtype=torch.float32)
    ]
    trainer = trained(Rough(way), batches, cuts=["third"])
    expected = plain(Rough(way), batches)
    assert_same_bits(trainer.state_dict(), dict(expected.state_dict()))


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("draws with NumPy", "draws from Python's or NumPy's generator.*Draw with torch"),
        ("has a backward of its own", "gets another gradient than in one piece"),
        ("checkpoints reentrantly", "gradients of this Rough cannot be asked.*use_reentrant=False"),
        ("drops layers", "to decide which of its modules run .LayerDrop..*Set it to 0"),
    ],
)
def test_what_no_record_can_hold_gets_words(way: str, words: str) -> None:
    model = Rough(way)
    before = torch.get_rng_state(), np.random.get_state(legacy=True)[1].copy()  # type: ignore[index]
    with pytest.raises(ConfigurationError, match=words):
        trained(model, vector_batches(1, dtype=torch.float32), cuts=["third"])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (
        way == "draws with NumPy"
        or (
            np.random.get_state(legacy=True)[1] == before[1]  # type: ignore[index]
        ).all()
    )


def test_a_batch_that_cannot_be_recorded_is_refused_and_the_run_goes_on() -> None:
    batches = vector_batches(3, dtype=torch.float32)
    trainer = trained(Rough("looks at values"), batches[:2], cuts=["third"])
    for _ in range(2):
        with pytest.raises(BatchError, match="cannot record this Rough.*The batch was not started"):
            trainer.step(*vector_batches(1, 3, dtype=torch.float32)[0])
    trainer.step(*batches[2])
    expected = plain(Rough("looks at values"), batches)
    assert_same_bits(trainer.state_dict(), dict(expected.state_dict()))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_stage_may_begin_where_gradients_are_off(frozen: bool) -> None:
    torch.manual_seed(5)
    model = nets.FrozenEncoder()
    model.encoder.requires_grad_(frozen is False)
    batches = vector_batches(4, dtype=torch.float32)
    trainer = trained(model, batches, cuts=["encoder.2", "layers.1"])
    expected = plain(model, batches)
    assert_same_bits(trainer.state_dict(), dict(expected.state_dict()))


@pytest.mark.parametrize(
    "make",
    [
        test_models.Skips,
        pytest.param(test_models.Doubles, marks=pytest.mark.long),
        pytest.param(test_models.Counts, marks=pytest.mark.long),
        lambda: test_models.Hides("gradient"),
        lambda: test_models.Tells("before", (2,)),
    ],
)
def test_what_is_no_chain_of_blocks_is_recorded(make: Callable[[], nn.Module]) -> None:
    batches = vector_batches(3, dtype=torch.float32)
    model = make()
    trainer = trained(model, batches, stages=2)
    assert_same_bits(trainer.state_dict(), dict(plain(model, batches).state_dict()))


@pytest.mark.parametrize("where", [("before", "behind"), ("between",), ("between anew",)])
def test_a_buffer_that_two_pieces_write_is_refused(where: tuple[str, ...]) -> None:
    words = "buffer 'seen' of this Notes is written .* Nor can it be recorded and divided.*'seen'"
    with pytest.raises(ConfigurationError, match=words):
        trained(test_models.Notes(*where), vector_batches(1, dtype=torch.float32), stages=2)


class Decides(nn.Module):
    """Goes by a value, which no record can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        return self.second(hidden * 2 if hidden.sum() > 0 else hidden)  # type: ignore[no-any-return]


def test_a_model_that_cannot_be_recorded_prints_nothing_beside_the_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    trainer = offbeat.Trainer(
        Decides(),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        stages=2,
    )
    with pytest.raises(ConfigurationError, match="torch.export cannot record this Decides") as said:
        trainer.step(torch.ones(2, 4), torch.ones(2, 4))
    assert "\n" not in str(said.value)
    assert capfd.readouterr().err == ""
