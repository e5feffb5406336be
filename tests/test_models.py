"""Models that are no nn.Sequential: cut between blocks, or traced, without touching their code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jobs
import offbeat
from helpers import OPTIMIZERS, assert_same_bits, plain_loop, vector_batches
from offbeat.averaging import DaSGD
from offbeat.cutting.blocks import BlocksCut
from offbeat.cutting.compare import _other_gradient
from offbeat.cutting.cut import Cut
from offbeat.cutting.given import GivenCut
from offbeat.cutting.sequential import SequentialCut
from offbeat.cutting.sharing import Sharing
from offbeat.cutting.traced import TracedCut
from offbeat.cutting.ways import WAYS, plan_cut
from offbeat.errors import ConfigurationError
from offbeat.methods import ADL, DSP, Method, StaleWeights, Synchronous
from offbeat.stages.trial import same_values

METHODS: list[Method] = [Synchronous(), StaleWeights(), ADL(2), DSP()]


def trained(model: nn.Module, batches: Any, method: Method, **settings: Any) -> offbeat.Trainer:
    trainer = offbeat.Trainer(
        copy.deepcopy(model),
        loss=settings.pop("loss", F.cross_entropy),
        optimizer=settings.pop("optimizer", OPTIMIZERS["momentum"]),
        method=method,
        seed=3,
        **settings,
    )
    for x, y in batches:
        trainer.step(x, y)
    trainer.flush()
    return trainer


@pytest.fixture
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no chain of blocks is refused, as is what cannot be recorded either."""
    monkeypatch.setattr(BlocksCut, "otherwise", lambda cut: None)


# ------------------------------------------------------------------ blocks


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.title)
def test_blocks_are_cut_like_the_same_layers_in_a_list(method: Method) -> None:
    """The cut model and a hand-written list of stages give the same bits."""
    model, batches = jobs.tower(), jobs.tower_batches()
    ours = trained(model, batches, method, cuts=["blocks.1", "blocks.3"])
    assert ours.cuts == (1, 3)
    twin = copy.deepcopy(model)
    by_hand = trained(jobs.HandCut(twin).stages(), batches, method)  # type: ignore[arg-type]
    theirs = [p for worker in by_hand._engine.workers for p in worker.stage.parameters]
    mine = [p for worker in ours._engine.workers for p in worker.stage.parameters]
    assert len(mine) == len(theirs) == len(list(model.parameters()))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    lone = copy.deepcopy(model)
    lone.load_state_dict(ours.state_dict())  # every name of the unsplit model, and only those


def test_stages_balance_by_themselves_and_use_the_longest_list() -> None:
    ours = trained(jobs.tower(), jobs.tower_batches(), StaleWeights(), stages=3)
    assert ours.cuts is not None
    assert len(ours.cuts) == 2
    assert [len(worker.stage.parameters) > 0 for worker in ours._engine.workers] == [True] * 3


def test_the_first_forward_is_that_of_the_whole_model_and_touches_nothing() -> None:
    model, batches = jobs.tower(), jobs.tower_batches()
    reference = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](reference.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    ours = trained(model, batches, Synchronous(), cuts=["blocks.2"])
    assert_same_bits(ours.state_dict(), dict(reference.state_dict()))
    found = ours.evaluate(batches)
    reference.eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(reference(x), y)) for x, y in batches]
    assert found.loss == pytest.approx(sum(losses) / len(losses), abs=1e-6)


class Skips(jobs.Tower):
    """Uses the embedding again behind the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = early = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden, None)[0]
        logits: Tensor = self.outlet(hidden + early)
        return logits


class Doubles(jobs.Tower):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = 2 * block(hidden, None)[0]
        logits: Tensor = self.outlet(hidden)
        return logits


class Numbers(jobs.Tower):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inlet(x)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, torch.full((1,), float(number)))[0]
        logits: Tensor = self.outlet(hidden)
        return logits


def test_every_block_gets_the_arguments_that_the_model_gives_it() -> None:
    torch.manual_seed(1)
    model: Any = Numbers()
    expected, _ = plain_loop(model, jobs.tower_batches())
    found = trained(model, jobs.tower_batches(), Synchronous(), cuts=["blocks.1", "blocks.3"])
    assert_same_bits(found.state_dict(), expected.state_dict())


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Skips, "Skips cannot run in stages: parameter 'inlet.weight'.* is used behind the blocks"),
        (Doubles, "what block 0 returned is not only given to the next blocks"),
    ],
)
def test_blocks_that_are_no_chain_are_refused(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trained(kind(), jobs.tower_batches(), StaleWeights(), cuts=["blocks.2"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cuts": ["blocks.9"]}, "'blocks.9' is not a block of this Tower.*blocks.1 to blocks.3"),
        ({"cuts": ["blocks.2", "blocks.1"]}, "they rise"),
        ({"stages": 99}, r"99 stages, but this Tower has \d+ modules to cut at"),
        ({"ppv": (2,)}, "ppv counts the layers of an nn.Sequential, and this is a Tower"),
        ({"cuts": ["tower.2"]}, "'tower.2' is not a module of this Tower"),
    ],
)
def test_wrong_paths_get_words(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trained(jobs.tower(), [], StaleWeights(), **settings)


def test_children_of_a_sequential_may_be_named() -> None:
    model = nn.Sequential()
    for name in ("a", "b", "c"):
        model.add_module(name, nn.Linear(6, 6))
    assert trained(model, [], StaleWeights(), cuts=["b"]).cuts == (1,)
    with pytest.raises(ConfigurationError, match="unknown child to cut at 'd'"):
        trained(model, [], StaleWeights(), cuts=["d"])


class Centred(nn.Module):
    """Assigns its buffer anew, where BatchNorm writes into its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return x - self.mean


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.centred, self.inlet, self.head = Centred(), nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def before(self, x: Tensor) -> Tensor:
        return self.inlet(self.centred(x))  # type: ignore[no-any-return]

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def behind(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.between(self.before(x)))


class Backwards(nn.Module):
    """Registers its modules in another order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.head = nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.inlet = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def test_clipping_adds_up_norms_in_the_order_of_the_model() -> None:
    model: Any = Backwards()
    batches = vector_batches(20, dtype=torch.float32)
    expected, _ = plain_loop(model, batches, clip=0.01)
    found = trained(model, batches, Synchronous(), stages=3, clip=0.01)
    assert_same_bits(found.state_dict(), expected.state_dict())


def test_a_buffer_that_a_forward_assigns_anew_is_the_model_s() -> None:
    model: Any = Tower()
    batches = vector_batches(4, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)
    found = trained(model, batches, Synchronous(), stages=2)
    assert_same_bits(found.state_dict(), expected.state_dict())
    assert found.state_dict()["centred.mean"].any()


class Hides(nn.Module):
    """What cannot be cut, where zeros keep the outputs of the first batch the same."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.way = way
        self.inlet, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Shifts() for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(8))
        self.shifts = nn.Parameter(torch.ones(3, 8))
        if way == "head":
            nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = early = self.inlet(x)
        for number, block in enumerate(self.blocks):
            if self.way == "blocks":
                hidden = block(hidden, self.shifts[number])
            else:
                hidden = block(hidden, self.shift if self.way == "argument" else 0.0)
        if self.way == "head":
            hidden = hidden + early
        elif self.way == "gate":
            hidden = hidden + self.shift * early
        elif self.way == "gradient":  # nothing in the forward, something in the backward
            hidden = hidden + (early - early.detach())
        return self.head(hidden)  # type: ignore[no-any-return]


class Shifts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return torch.relu(super().forward(x)) + shift


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("head", "'inlet.weight', or something made of it, is used behind the blocks"),
        ("gate", "'inlet.weight', or something made of it, is used behind the blocks"),
        ("gradient", "'inlet.weight', or something made of it, is used behind the blocks"),
    ],
)
def test_zeros_do_not_hide_what_cannot_be_cut(way: str, words: str) -> None:
    model = Hides(way)
    batches = vector_batches(1, dtype=torch.float32)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    trainer = offbeat.Trainer(
        model, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], cuts=["blocks.1"]
    )
    with pytest.raises(ConfigurationError, match=words):
        trainer.step(*batches[0])
    assert_same_bits(dict(model.state_dict()), dict(before))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["argument", "blocks"])
def test_weights_that_blocks_are_called_with_are_trained(way: str) -> None:
    model: Any = Hides(way)
    batches = vector_batches(4, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)
    found = trained(model, batches, Synchronous(), stages=3)
    assert_same_bits(found.state_dict(), expected.state_dict())
    assert found.state_dict()["shift" if way == "argument" else "shifts"].std() > 0


class Particular(nn.Module):
    """A block that cannot run on just any weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shifts()
        self.one = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor, shift: float) -> Tensor:
        if self.one != 1:
            raise ArithmeticError(f"one is {float(self.one)}")
        return self.inner(x, shift)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Shifts, Particular])
def test_a_chain_with_zeros_trains_like_a_plain_loop(kind: type[nn.Module]) -> None:
    model: Any = Hides("none")
    model.blocks = nn.ModuleList(kind() for _ in range(3))
    nn.init.zeros_(model.head.weight)
    batches = vector_batches(4, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)
    found = trained(model, batches, Synchronous(), stages=2)
    assert_same_bits(found.state_dict(), expected.state_dict())


class Notes(Tower):
    """Buffers of its own: read, or written before, between or behind the blocks."""

    scale: Tensor
    seen: Tensor

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.register_buffer("seen", torch.zeros(4))

    def _note(self, place: str, value: Tensor) -> None:
        if place in self.where and self.training:
            self.seen.add_(value.detach().mean())
        elif f"{place} anew" in self.where and self.training:
            self.seen = self.seen + value.detach().mean()

    def forward(self, x: Tensor) -> Tensor:
        self._note("before", x)
        hidden = self.inlet(self.centred(x))
        for block in self.blocks:
            hidden = block(hidden)
            self._note("between", hidden)
        logits = self.head(hidden) * self.scale
        self._note("behind", logits)
        if "read" in self.where:
            logits = logits + self.seen
        return logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "where", ["before", "before anew", "behind", "behind anew", "nowhere"], ids=str
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_buffers_of_the_model_itself_are_those_of_its_ends(where: str, replicas: int) -> None:
    model: Any = Notes(where)
    batches = vector_batches(4, dtype=torch.float32)
    found = trained(model, batches, Synchronous(), stages=2, replicas=replicas)
    state = found.state_dict()
    if replicas == 1:
        expected, _ = plain_loop(model, batches)
        assert_same_bits(state, expected.state_dict())
    assert state["seen"].any() == (where != "nowhere")
    state["scale"] = torch.full((4,), 3.0)
    found.load_state_dict(state)
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(batches[0][0]), batches[0][1]))
    assert found.evaluate(batches[:1]).loss == pytest.approx(loss, abs=1e-6)


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(
    ("where", "words"),
    [
        (("before", "read"), "is written before the blocks and used before and behind them"),
        (("before", "behind"), "is written before and behind the blocks"),
        (("between",), "is written between its blocks, .* write it before or behind them"),
        (("between anew",), "is written between its blocks, .* write it before or behind them"),
    ],
    ids=str,
)
def test_a_buffer_written_at_one_end_and_used_at_the_other_is_refused(
    where: tuple[str, ...], words: str
) -> None:
    batches = vector_batches(1, dtype=torch.float32)
    with pytest.raises(ConfigurationError, match=f"buffer 'seen' of this Notes {words}"):
        trained(Notes(*where), batches, Synchronous(), stages=2)


class Counts(Tower):
    """Two buffers of one module, each written at another end."""

    n_in: Tensor
    n_out: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_in", torch.zeros(()))
        self.register_buffer("n_out", torch.zeros(()))

    def before(self, x: Tensor) -> Tensor:
        self.n_in += 1
        return super().before(x)

    def behind(self, hidden: Tensor) -> Tensor:
        self.n_out += 1
        return super().behind(hidden)


@pytest.mark.usefixtures("no_records")
def test_buffers_of_one_module_written_at_both_ends_are_refused() -> None:
    words = r"'n_in' is written before the blocks and 'n_out' behind them.*\(Counts\).*of its own"
    with pytest.raises(ConfigurationError, match=words):
        trained(Counts(), vector_batches(1, dtype=torch.float32), Synchronous(), stages=2)


class Scales(Tower):
    """Makes something of a constant before the blocks and uses it behind them."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))

    def before(self, x: Tensor) -> Tensor:
        self.twice = 2 * self.scale
        return super().before(x)

    def behind(self, hidden: Tensor) -> Tensor:
        return super().behind(hidden) * self.twice


def test_a_constant_that_is_loaded_reaches_both_ends() -> None:
    batches = vector_batches(2, dtype=torch.float32)
    found = trained(Scales(), batches, Synchronous(), stages=2)
    state = found.state_dict() | {"scale": torch.full((4,), 3.0)}
    found.load_state_dict(state)
    model = Scales().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        loss = float(F.cross_entropy(model(batches[0][0]), batches[0][1]))
    assert found.evaluate(batches[:1]).loss == pytest.approx(loss, abs=1e-6)


class Remembers(nn.Linear):
    """A block that takes off a mean, which something else may write."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.mean


class Tells(Tower):
    """Writes at an end what some of its blocks read."""

    mean: Tensor

    def __init__(self, end: str, readers: tuple[int, ...]) -> None:
        super().__init__()
        self.end = end
        self.register_buffer("mean", torch.zeros(8))
        self.blocks = nn.ModuleList(
            Remembers(self.mean) if place in readers else nn.Linear(8, 8) for place in range(3)
        )

    def before(self, x: Tensor) -> Tensor:
        hidden = super().before(x)
        if self.end == "before":
            self.mean.copy_(hidden.detach().mean(0))
        return hidden

    def behind(self, hidden: Tensor) -> Tensor:
        if self.end == "behind":
            self.mean.copy_(hidden.detach().mean(0))
        return super().behind(hidden)


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(("end", "reader"), [("before", 2), ("behind", 0)])
def test_a_buffer_that_an_end_writes_and_a_block_of_another_stage_holds_is_refused(
    end: str, reader: int
) -> None:
    batches = vector_batches(3, dtype=torch.float32)
    words = "buffer 'mean' of this Tells is written in training and lies in stages 0 and 1"
    settings: Any = {"loss": F.cross_entropy, "optimizer": OPTIMIZERS["momentum"]}
    trainer = offbeat.Trainer(Tells(end, (reader,)), cuts=["blocks.1"], **settings)
    with pytest.raises(ConfigurationError, match=words):
        trainer.step(*batches[0])
    model: Any = Tells(end, (2 - reader,))
    expected, _ = plain_loop(Tells(end, (2 - reader,)), batches)  # type: ignore[arg-type]
    trainer = offbeat.Trainer(model, cuts=["blocks.1"], **settings)
    for batch in batches:
        trainer.step(*batch)
    assert_same_bits(trainer.state_dict(), expected.state_dict())


def shares_statistics(cut: str) -> tuple[nn.Module, dict[str, Any]]:
    """A BatchNorm without weights in two stages, in each way of cutting."""
    torch.manual_seed(6)
    norm = nn.BatchNorm1d(8, affine=False)
    if cut == "traced":
        return Norms(norm), {"cuts": ["second"]}
    if cut == "blocks":
        model = Tower()
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), norm) for _ in range(2))
        return model, {"stages": 2}
    layers = nn.Linear(6, 8), norm, nn.Linear(8, 8), norm, nn.Linear(8, 4)
    return nn.Sequential(*layers), {cut: [2] if cut == "cuts" else 2}


class Norms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.norm(self.first(x))))
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", ["cuts", "stages", "blocks", "traced"])
def test_statistics_of_two_stages_are_refused_unless_frozen(cut: str) -> None:
    batches = vector_batches(2, dtype=torch.float32)
    model, settings = shares_statistics(cut)
    with pytest.raises(ConfigurationError, match=r"running.mean.*(cannot belong|do not see)"):
        trained(model, batches, Synchronous(), **settings)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    trained(model, batches, Synchronous(), **settings)


# ------------------------------------------------------------------ what models do around blocks


class Starts(nn.Module):
    """Takes its first weights from the first batch, or registers a buffer then."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.Linear(8, 8)
        if way == "weight":
            self.shift, self.started = nn.Parameter(torch.zeros(8)), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.way == "weight" and not self.started:
            self.shift.data.copy_(x.detach().mean(0))
            self.started = True
        elif self.way == "buffer" and not hasattr(self, "shift"):
            self.register_buffer("shift", x.detach().mean(0))
        return x - self.shift


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        again = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return torch.relu(again)


class Places(Tower):
    """Uses a weight before the blocks without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(3, 8)

    def before(self, x: Tensor) -> Tensor:
        return super().before(x) + self.places.weight[0]


class Saves(Tower):
    def before(self, x: Tensor) -> Tensor:
        early = torch.utils.checkpoint.checkpoint(torch.tanh, super().before(x), use_reentrant=True)
        assert isinstance(early, Tensor)
        return early


class Remakes(Tower):
    """Runs again in the backward what comes before the blocks."""

    def before(self, x: Tensor) -> Tensor:
        inner = super().before
        early = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
        assert isinstance(early, Tensor)
        return early


class Caches(Tower):
    """Fills a constant in its first forward and reads it at both ends."""

    steps: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", None)

    def before(self, x: Tensor) -> Tensor:
        if self.steps is None:
            self.steps = torch.arange(len(x))[:, None]
        return super().before(x) + self.steps

    def behind(self, hidden: Tensor) -> Tensor:
        assert self.steps is not None
        return super().behind(hidden * self.steps)


class Guards(Tower):
    """Will not evaluate on other weights than its own."""

    def behind(self, hidden: Tensor) -> Tensor:
        if not self.training and self.head.bias.abs().max() > 0:
            raise ArithmeticError("what is this bias?")
        return super().behind(hidden)


class TiesEarly(Tower):
    """One weight in two modules, both before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 8)
        self.other.weight = self.inlet.weight

    def before(self, x: Tensor) -> Tensor:
        return super().before(x) * self.other(x)  # type: ignore[no-any-return]


class Renames(Tower):
    """Calls its blocks by another name than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = self.blocks

    def between(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Recurs(Tower):
    """Blocks that return several things, of which the next takes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.GRU(8, 8) for _ in range(3))

    def between(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden, _ = block(hidden)
        return hidden


def tower_with(blocks: Any) -> Tower:
    model = Tower()
    torch.manual_seed(7)
    model.blocks = nn.ModuleList(blocks() for _ in range(3))
    return model


def normalised(*ends: str) -> Tower:
    model = Tower()
    for end in ends:
        torch.nn.utils.parametrizations.weight_norm(model.get_submodule(end))
    return model


def unbiased() -> Tower:
    model = Guards()
    nn.init.zeros_(model.head.bias)
    return model


PECULIAR: dict[str, Any] = {
    "weights from the first batch": lambda: tower_with(lambda: Starts("weight")),
    "a buffer of the first batch": lambda: tower_with(lambda: Starts("buffer")),
    "checkpoints before the blocks": Remakes,
    "reentrant checkpoints": lambda: tower_with(Recomputes),
    "reentrant checkpoints before the blocks": Saves,
    "a weight without its module": Places,
    "in place first": lambda: tower_with(
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    ),
    "a cache": Caches,
    "a check in evaluation": unbiased,
    "weight norm": lambda: normalised("inlet", "head"),
    "tuples": Recurs,
    "a weight twice before the blocks": TiesEarly,
    "blocks by two names": Renames,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # what runs for nothing
@pytest.mark.parametrize("kind", PECULIAR)
def test_a_peculiar_model_trains_like_a_plain_loop(kind: str) -> None:
    model: Any = PECULIAR[kind]()
    batches = vector_batches(3, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)
    found = trained(model, batches, Synchronous(), stages=2)
    assert_same_bits(found.state_dict(), expected.state_dict())


def test_a_model_that_was_compiled_in_place_is_cut() -> None:
    model = Tower()
    batches = vector_batches(2, dtype=torch.float32)
    expected, _ = plain_loop(model, batches)  # type: ignore[arg-type]
    model.compile(backend="eager")
    trainer = offbeat.Trainer(
        model, loss=F.cross_entropy, optimizer=OPTIMIZERS["momentum"], stages=2
    )
    for batch in batches:
        trainer.step(*batch)
    assert_same_bits(trainer.state_dict(), expected.state_dict())


class Drops(Tower):
    """Dropout at both ends, by two modules or by one."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.early = self.late = nn.Dropout(0.5)
        if modules == 2:
            self.late = nn.Dropout(0.5)

    def before(self, x: Tensor) -> Tensor:
        return self.early(super().before(x))  # type: ignore[no-any-return]

    def behind(self, hidden: Tensor) -> Tensor:
        return self.late(super().behind(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_dropout_at_both_ends_is_drawn_where_it_counts(modules: int, replicas: int) -> None:
    batches = vector_batches(2, dtype=torch.float32)
    found = trained(Drops(modules), batches, StaleWeights(), stages=2, replicas=replicas)
    for worker in found._engine.workers:
        seen = [m for m in worker.stage.module.modules() if isinstance(m, nn.Dropout)]
        output = worker.stage.module.frame.late(torch.ones(64))  # type: ignore[operator, union-attr]
        assert len(seen) == modules
        assert (output == 0).any()


class Divides(Tower):
    def before(self, x: Tensor) -> Tensor:
        if not self.inlet.weight.any():
            raise ArithmeticError("a weight of zeros")
        return super().before(x)


class Looks(Tower):
    """Blocks that are given whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Embedding(6, 8) for _ in range(3))

    def before(self, x: Tensor) -> Tensor:
        return x.argmax(1)

    def between(self, hidden: Tensor) -> Tensor:
        return torch.stack([block(hidden) for block in self.blocks]).mean(0)


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Divides, "Divides cannot run in stages: parameter 'inlet.weight'.* behind the blocks"),
        (Looks, "used behind the blocks, where only that of the last one is known"),
    ],
)
@pytest.mark.parametrize("settings", [{"stages": 2}, {"cuts": ["blocks.1"]}], ids=str)
def test_what_cannot_be_cut_gets_words(
    kind: type[nn.Module], words: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trained(kind(), vector_batches(1, dtype=torch.float32), Synchronous(), **settings)


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([NAN * 1j]), torch.tensor([NAN * 1j]), True),
        (torch.zeros(1), -torch.zeros(1), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.ones(1), [torch.ones(1), torch.ones(1)], False),
    ],
)
def test_the_same_values_are_those_of_one_shape_and_dtype(one: Any, other: Any, same: bool) -> None:
    assert same_values(one, other) is same


def test_gradients_are_told_apart_unless_they_differ_by_rounding() -> None:
    torch.manual_seed(8)
    gradient = torch.randn(40, 30)
    whole = {"weight": gradient}
    for other in (-gradient, gradient.flip(0), gradient + 0.01, gradient * NAN):
        assert _other_gradient(whole, {"weight": other}) == "weight"
    assert _other_gradient(whole, {}) == _other_gradient({}, whole) == "weight"
    assert _other_gradient(whole, {"weight": gradient * (1 + 1e-6)}) is None
    assert _other_gradient({"weight": gradient * NAN}, whole) is None


# ------------------------------------------------------------------ traced


class Branches(nn.Module):
    """A skip over a stage, a buffer of its own, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = early = torch.relu(self.norm(self.stem(x)))
        hidden = self.drop(torch.relu(self.first(hidden)))
        hidden = torch.relu(self.second(hidden)) + early * self.get_buffer("scale")
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


def images(count: int = 6, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(rows, 1, 8, 8, generator=generator), torch.randint(5, (rows,)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.title)
def test_a_traced_model_trains_and_loads_back(method: Method) -> None:
    batches = images()
    trainer = trained(Branches(), batches, method, cuts=["first", "second"])
    assert trainer.cuts == ("first", "second")
    assert [len(worker.stage.parameters) for worker in trainer._engine.workers] == [4, 2, 4]
    whole = Branches()
    whole.load_state_dict(trainer.state_dict())
    whole.eval()
    assert not torch.equal(whole.norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    parts = [(x[:3], y[:3]) for x, y in batches] + [(x[:1], y[:1]) for x, y in batches]
    with torch.no_grad():
        losses = [float(F.cross_entropy(whole(x), y)) * len(x) for x, y in parts]
    mean = sum(losses) / sum(len(x) for x, _ in parts)
    assert trainer.evaluate(parts).loss == pytest.approx(mean, abs=1e-6)
    trainer.step(batches[0][0][:4], batches[0][1][:4])


def test_without_dropout_tracing_gives_the_bits_of_a_plain_loop() -> None:
    model, batches = Branches(), images()
    model.drop.p = 0.0
    reference = copy.deepcopy(model)
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    ours = trained(model, batches, Synchronous(), stages=3, optimizer=OPTIMIZERS["sgd"])
    assert ours.cuts is not None
    assert len(ours.cuts) == 2
    for name, value in reference.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-6), name


class Chooses(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_what_cannot_be_traced_gets_words() -> None:
    with pytest.raises(ConfigurationError, match="torch.export cannot record this Chooses"):
        trained(Chooses(), images(1), StaleWeights(), cuts=["first"])
    with pytest.raises(ConfigurationError, match="'frist' is not a module of this Branches"):
        trained(Branches(), [], StaleWeights(), cuts=["frist"])


def test_a_traced_model_keeps_the_modes_of_its_modules() -> None:
    model, batches = Branches(), images()
    model.drop.eval()
    model.norm.eval()
    before = copy.deepcopy(model.norm.state_dict())
    expected, _ = plain_loop(model, batches)  # type: ignore[arg-type]
    ours = trained(model, batches, Synchronous(), cuts=["first"])
    for name, value in expected.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-6), name
    assert torch.equal(ours.state_dict()["norm.running_mean"], before["running_mean"])
    ours.evaluate(batches)


# ------------------------------------------------------------------ every way


def sequential() -> nn.Sequential:
    torch.manual_seed(9)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)
    return nn.Sequential(*layers)


EVERY: dict[type[Cut], tuple[Callable[[], Any], dict[str, Any]]] = {
    GivenCut: (lambda: [sequential()[:3], sequential()[3:]], {}),
    SequentialCut: (sequential, {"stages": 2}),
    BlocksCut: (jobs.tower, {"stages": 2}),
    TracedCut: (lambda: shares_statistics("traced")[0], {"cuts": ["head"]}),
}
"""Of every way to cut: a model for vectors of six, and settings that make two stages of it."""

EACH = pytest.mark.parametrize("way", EVERY, ids=lambda way: way.__name__)


def train_each(replicas: int) -> list[dict[str, Any]]:
    states = []
    for build, settings in EVERY.values():
        trainer = trained(
            build(), [], StaleWeights(), replicas=replicas, averaging=DaSGD(2, 1), **settings
        )
        for x, y in trainer.batches(jobs.tower_batches()):
            trainer.step(x, y)
        trainer.evaluate([(x[:4], y[:4]) for x, y in jobs.tower_batches()])
        states.append(trainer.state_dict())
    return states


def test_every_way_is_tried() -> None:
    assert set(EVERY) == set(WAYS)


@EACH
def test_a_cut_trains_like_a_plain_loop(way: type[Cut]) -> None:
    build, settings = EVERY[way]
    model, batches = build(), jobs.tower_batches()
    assert type(plan_cut(model, **settings)) is way
    expected, _ = plain_loop(model if way is not GivenCut else nn.Sequential(*model), batches)
    ours = trained(model, batches, Synchronous(), **settings)
    assert ours.stages == 2
    assert ours.cuts is not None and len(ours.cuts) == (way is not GivenCut)
    for name, value in expected.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-6), name


@EACH
def test_a_copy_of_a_cut_has_weights_of_its_own(way: type[Cut]) -> None:
    build, settings = EVERY[way]
    cut = plan_cut(build(), **settings).decide(jobs.tower_batches()[0][0])
    copied = cut.copy()
    assert copied.places == cut.places
    for one in (cut, copied):
        own = [p for module in one.modules for p in module.parameters()]
        assert {id(p) for p in own} == {id(p) for p in one.model.parameters()}
        assert not list(one.sharing().common())
    assert not {id(p) for p in cut.model.parameters()} & {id(p) for p in copied.model.parameters()}


def test_in_processes_and_with_replicas() -> None:
    alone = train_each(replicas=2)
    for states in offbeat.launch(train_each, 4, 2):
        for state, expected in zip(states, alone, strict=True):
            assert_same_bits(state, expected)


def test_sharing_names_the_stages_and_the_names_of_a_tensor() -> None:
    model = sequential()
    model[4].weight = model[3].weight
    sharing = Sharing.among(model, [model[:3], model[3:], model[4:]])
    assert sharing.uses(model[0].weight) == {0: ["0.weight"]}  # type: ignore[arg-type]
    ((name, tensor, uses), *_) = sharing.common()
    assert (name, uses) == ("3.weight", {1: ["3.weight", "4.weight"], 2: ["4.weight"]})
    assert tensor is model[3].weight


# ------------------------------------------------------------------ Hugging Face


def language_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=5, n_head=2, bos_token_id=0,
            eos_token_id=0, tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), "transformer.h"
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=5,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), "model.layers"


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def sentences(count: int = 8) -> list[tuple[Any, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(64, (4, 11), generator=generator) for _ in range(count)]
    mask = torch.ones(4, 10, dtype=torch.long)
    mask[0, :3] = 0  # an extra input, which every block needs
    return [({"input_ids": r[:, :-1], "attention_mask": mask}, r[:, 1:]) for r in rows]


@pytest.mark.filterwarnings("default")  # what transformers warns of is its own affair
@pytest.mark.parametrize("method", [Synchronous(), StaleWeights(), ADL(2)], ids=lambda m: m.title)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models_are_cut_as_they_are(kind: str, method: Method) -> None:
    model, blocks = language_model(kind)
    if kind == "gpt2":  # the reference loop below draws its dropout elsewhere
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    batches = sentences()
    cuts = [f"{blocks}.{number}" for number in (1, 3, 4)]
    trainer = trained(
        model, batches, method, cuts=cuts, loss=next_token_loss, optimizer=OPTIMIZERS["adamw"]
    )
    reference = copy.deepcopy(model)
    if isinstance(method, Synchronous):
        optimizer = OPTIMIZERS["adamw"](reference.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            next_token_loss(reference(**x, use_cache=False), y).backward()
            optimizer.step()
        assert_same_bits(trainer.state_dict(), dict(reference.state_dict()))
    reference.load_state_dict(trainer.state_dict())
    reference.eval()
    with torch.no_grad():
        losses = [float(next_token_loss(reference(**x), y)) for x, y in batches]
    assert trainer.evaluate(batches).loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_the_first_step_runs_a_block_ten_times() -> None:
    """In training and evaluation, at own and random weights, whole and cut; once more to see what
    belongs to which end; and to train."""
    model = jobs.tower()
    calls: list[bool] = []
    model.blocks[0].register_forward_pre_hook(lambda module, _: calls.append(module.training))
    trainer = offbeat.Trainer(
        model,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        stages=2,
    )
    x, y = jobs.tower_batches()[0]
    trainer.step(x, y)
    assert (len(calls), sum(calls)) == (10, 6)
    trainer.step(x, y)
    assert len(calls) == 11
