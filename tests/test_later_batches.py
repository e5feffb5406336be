"""What the first batch does not show: weights it leaves out, arguments that differ, branches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat
from helpers import OPTIMIZERS, assert_same_bits
from offbeat.errors import OffbeatError, StageError
from offbeat.methods import GPipe, Method, PipeDream, Synchronous
from offbeat.nest import Nest

Batches = Sequence[tuple[Nest, Tensor]]


def batches_of(*lengths: int, seed: int = 1, **more: Callable[[int], Tensor | None]) -> Batches:
    """Rows of six numbers at so many places; ``more``: further inputs, by the number of a batch."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, length in enumerate(lengths):
        x: Any = {"x": torch.randn(4, length, 6, generator=generator)}
        x |= {name: make(number) for name, make in more.items() if make(number) is not None}
        found.append((x, torch.randint(4, (4,), generator=generator)))
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        update = torch.tanh(self.linear(hidden))
        return hidden + (update if mask is None else mask @ update)


class Model(nn.Module):
    """A prefix, four blocks and a suffix; ``before``, ``between`` and ``behind`` may do more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.outlet = nn.Linear(8, 4)

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        return self.inlet(x)  # type: ignore[no-any-return]

    def between(self, hidden: Tensor, number: int) -> tuple[Any, ...]:
        return (hidden,)

    def behind(self, hidden: Tensor, early: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor, pixels: Tensor | None = None) -> Tensor:
        hidden = early = self.before(x, pixels)
        for number, block in enumerate(self.blocks):
            hidden = block(*self.between(hidden, number))
        return self.outlet(self.behind(hidden, early).mean(1))  # type: ignore[no-any-return]


def plain(model: nn.Module, batches: Batches, parts: int = 1) -> dict[str, Any]:
    model = copy.deepcopy(model)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        for part in range(parts):
            rows = {name: value.tensor_split(parts)[part] for name, value in x.items()}
            target = y.tensor_split(parts)[part]
            loss = F.cross_entropy(model(**rows), target)
            (loss if parts == 1 else loss * (len(target) / len(y))).backward()
        optimizer.step()
    return model.state_dict()


def trained(
    model: nn.Module, batches: Batches, method: Method = Synchronous(), **settings: Any
) -> offbeat.Trainer:
    trainer = offbeat.Trainer(
        copy.deepcopy(model),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS["momentum"],
        method=method,
        **({"cuts": ["blocks.1", "blocks.3"]} | settings),
    )
    for x, y in trainer.batches(batches):
        trainer.step(x, y)
    trainer.flush()
    return trainer


# ------------------------------------------------------------------ weights


def pixels_from(first: int) -> Callable[[int], Any]:
    return lambda number: None if number < first else torch.full((4, 1, 5), 0.1 * (number + 1))


class Sees(Model):
    """A vision tower, which a batch of text alone does not call."""

    def __init__(self, where: str) -> None:
        super().__init__()
        inlet, blocks, outlet = self.inlet, self.blocks, self.outlet
        del self.inlet, self.blocks, self.outlet
        self.inlet = inlet
        if where == "before":
            self.eyes = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(1), nn.Linear(8, 8))
        self.blocks = blocks
        if where == "behind":
            self.eyes = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(1), nn.Linear(8, 8))
        self.outlet = outlet

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        text = super().before(x, pixels)
        return text if pixels is None else torch.cat([text, self.eyes(pixels)], 1)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_tower_that_the_first_batches_do_not_use_is_trained(parts: int) -> None:
    model: Any = Sees("before")
    batches = batches_of(5, 5, 5, 5, pixels=pixels_from(2))
    method = Synchronous() if parts == 1 else GPipe(parts)
    found = trained(model, batches, method).state_dict()
    assert_same_bits(found, plain(model, batches, parts))
    assert not torch.equal(found["eyes.0.weight"], model.eyes[0].weight)
    assert found["eyes.1.num_batches_tracked"] == 2 * parts


def test_a_tower_on_the_wrong_side_is_refused_and_the_advice_helps() -> None:
    model, batches = Sees("behind"), batches_of(5, 5, 5, pixels=pixels_from(1))
    words = "'eyes.*', or something made of it, is used before the blocks.*let the first batch use"
    with pytest.raises(StageError, match=words):
        trained(model, batches)
    batches = batches_of(5, 5, 5, pixels=pixels_from(0))
    assert_same_bits(trained(model, batches).state_dict(), plain(model, batches))


class Frozen(Sees):
    """Its tower is no part of any graph."""

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        with torch.no_grad():
            seen = self.eyes[2](self.eyes[0](pixels))
        return torch.cat([self.inlet(x), seen], 1)


def test_weights_that_no_gradient_reaches_lie_where_they_are_used() -> None:
    model, batches = Frozen("behind"), batches_of(5, 5, 5, pixels=pixels_from(0))
    assert_same_bits(trained(model, batches).state_dict(), plain(model, batches))


class Remembers(Model):
    """Uses an LSTM of the prefix, which keeps its weights in a list, behind the blocks as well."""

    def __init__(self) -> None:
        super().__init__()
        outlet = self.outlet
        del self.outlet
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.outlet = outlet

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        early = super().before(x, pixels)
        return early if pixels is None else early + self.memory(early)[0]

    def behind(self, hidden: Tensor, early: Tensor) -> Tensor:
        return self.memory(hidden)[0]  # type: ignore[no-any-return]


def test_weights_in_a_list_of_a_module_are_followed() -> None:
    batches = batches_of(5, 5, 5, pixels=lambda n: torch.ones(4) if n == 2 else None)
    assert_same_bits(
        trained(Remembers(), batches[:2]).state_dict(), plain(Remembers(), batches[:2])
    )
    with pytest.raises(StageError, match=r"'memory.*is used before the blocks, but belongs"):
        trained(Remembers(), batches)


class Hidden(Model):
    """Keeps a block where nobody looks, and uses it again behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = (self.blocks[0],)

    def behind(self, hidden: Tensor, early: Tensor) -> Tensor:
        return hidden + self.kept[0].linear(early.new_ones(8))  # type: ignore


def test_a_weight_of_another_stage_that_is_used_in_disguise_is_trained() -> None:
    """Cut at its blocks it computes something else than in one piece, so it is recorded."""
    batches = batches_of(5, 5, 5)
    trainer = trained(Hidden(), batches)
    assert trainer.cuts == ("blocks.1", "blocks.3")
    assert_same_bits(trainer.state_dict(), plain(Hidden(), batches))


class Counts(Model):
    """Counts its pictures, in the prefix."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        if pixels is not None:
            self.seen += 1
        return super().before(x, pixels) + self.seen.clone()


def test_a_buffer_that_is_first_written_later_is_refused_and_the_advice_helps() -> None:
    with pytest.raises(StageError, match=r"buffer 'Counts.seen' is written in this batch.*Let the"):
        trained(Counts(), batches_of(3, 3, pixels=pixels_from(1)))
    batches = batches_of(3, 3, 3, pixels=lambda n: None if n == 1 else torch.ones(4))
    assert_same_bits(trained(Counts(), batches).state_dict(), plain(Counts(), batches))


# ------------------------------------------------------------------ arguments


class Windows(Model):
    """Every other block looks back two places only, which a short batch does not show."""

    def between(self, hidden: Tensor, number: int) -> tuple[Any, ...]:
        places = torch.arange(hidden.shape[1])
        apart = places[:, None] - places
        full, near = (apart >= 0).float(), ((apart >= 0) & (apart < 3)).float()
        return hidden, near if number % 2 else full


class WindowsAtOnce(Windows):
    """The same, with the masks made before the blocks, and from a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        hidden = super().before(x, pixels)
        self.full, self.near = (super(Windows, self).between(hidden, 0), None)
        self.masks = [self.slope * Windows.between(self, hidden, n)[1] for n in (0, 1)]
        return hidden

    def between(self, hidden: Tensor, number: int) -> tuple[Any, ...]:
        return hidden, self.masks[number % 2]


LENGTHS = (3, 7, 2, 9)


@pytest.mark.parametrize("kind", [Windows, WindowsAtOnce])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_block_has_its_own_mask_in_every_batch(kind: type[Model], parts: int) -> None:
    model, batches = kind(), batches_of(*LENGTHS)
    method = Synchronous() if parts == 1 else GPipe(parts)
    trainer = trained(model, batches, method)
    assert_same_bits(trainer.state_dict(), plain(model, batches, parts))
    model.load_state_dict(trainer.state_dict())
    model.eval()
    for x, y in batches_of(11, 1):
        with torch.no_grad():
            expected = float(F.cross_entropy(model(**x), y))
        assert trainer.evaluate([(x, y)]).loss == pytest.approx(expected, rel=1e-6)


def train_windows(kind: type[Model], method: Method) -> dict[str, Any]:
    return trained(kind(), batches_of(*LENGTHS), method).state_dict()


def test_masks_travel_between_processes() -> None:
    for kind, method in ((Windows, Synchronous()), (WindowsAtOnce, PipeDream())):
        alone = train_windows(kind, method)
        for state in offbeat.launch(train_windows, 3, kind, method):
            assert_same_bits(state, alone)


class Biases(Model):
    """Blocks that hand on more than one tensor, the first of which makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(4))

    def forward(self, x: Tensor, pixels: Tensor | None = None) -> Tensor:
        hidden, bias = self.before(x, pixels), None
        for block in self.blocks:
            hidden, bias = block(hidden, bias)
        return self.outlet(hidden.mean(1))  # type: ignore[no-any-return]


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = self.own * hidden.mean(1, keepdim=True) if bias is None else bias
        return hidden + torch.tanh(self.linear(hidden) + bias), bias


@pytest.mark.parametrize("cuts", [["blocks.1", "blocks.2"], ["blocks.3"]], ids=str)
def test_blocks_may_hand_on_more_than_one_tensor(cuts: list[str]) -> None:
    model, batches = Biases(), batches_of(5, 3)
    found = trained(model, batches, cuts=cuts).state_dict()
    assert_same_bits(found, plain(model, batches))


class Lengths(Model):
    """Asks what its blocks return for a shape, or is given a plain number by them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Long(how) for _ in range(4))

    def forward(self, x: Tensor, pixels: Tensor | None = None) -> Tensor:
        hidden, length = self.before(x, pixels), 1.0
        for block in self.blocks:
            hidden, told = block(hidden, length)
            length = told if self.how == "told" else float(hidden.shape[1])
        return self.outlet(hidden.mean(1))  # type: ignore[no-any-return]


class Long(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = how

    def forward(self, x: Tensor, length: float) -> Any:  # type: ignore[override]
        hidden = torch.tanh(super().forward(x)) / length
        if self.how == "halves" and len(x[0]) > 4:
            hidden = hidden[:, ::2]
        return hidden, float(len(x[0])) if self.how == "told" else None


@pytest.mark.parametrize(
    ("how", "words"),
    [("asks", None), ("halves", "asks for the shape or type"), ("told", "a Long returned")],
)
def test_shapes_and_numbers_between_blocks_are_right_or_refused(
    how: str, words: str | None
) -> None:
    batches = batches_of(3, 3, 6)
    if words is None:
        assert_same_bits(trained(Lengths(how), batches).state_dict(), plain(Lengths(how), batches))
    else:
        trained(Lengths(how), batches[:2])
        with pytest.raises(StageError, match=words):
            trained(Lengths(how), batches)


# ------------------------------------------------------------------ branches


class Branches(Model):
    """Does something in long batches that it does not do in short ones."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.length = 0

    def before(self, x: Tensor, pixels: Tensor | None) -> Tensor:
        self.length = x.shape[1]
        hidden = super().before(x, pixels)
        if self.does("late weight early"):
            hidden = hidden * self.outlet.bias.mean()
        return hidden

    def does(self, what: str) -> bool:
        return self.what == what and self.length > 4

    def between(self, hidden: Tensor, number: int) -> tuple[Any, ...]:
        if self.does("doubles") and number == 2:
            hidden = 2 * hidden
        if self.does("writes") and number == 2:
            hidden += 1
        if self.does("looks") and number == 2 and hidden.mean() > 0:
            return (hidden.clone(),)
        if self.does("attribute"):
            block: Any = self.blocks[number]
            block.number = self.length
        if self.does("block weight") and number == 2:
            last: Any = self.blocks[3]
            return hidden, last.linear.weight[: self.length, : self.length]
        return (hidden,)

    def behind(self, hidden: Tensor, early: Tensor) -> Tensor:
        if self.does("skips"):
            return hidden + early
        if self.does("early weight late"):
            return hidden + self.inlet.bias
        return hidden

    def forward(self, x: Tensor, pixels: Tensor | None = None) -> Tensor:
        hidden = early = self.before(x, pixels)
        for number, block in enumerate(self.blocks):
            if self.does("leaves out") and number == 2:
                continue
            if self.does("stops") and number == 3:
                break
            hidden = block(*self.between(hidden, number))
            if (self.does("repeats") and number == 1) or (self.does("repeats 3") and number == 3):
                hidden = block(hidden)
        if self.does("returns early"):
            return self.outlet(early.mean(1))  # type: ignore[no-any-return]
        return self.outlet(self.behind(hidden, early).mean(1))  # type: ignore[no-any-return]


BRANCHES = {
    "late weight early": "'outlet.bias'.* is used before the blocks, but belongs",
    "doubles": "what block 1 returned is not only given to the next blocks",
    "writes": "what block 1 returned is not only given to the next blocks",
    "looks": "what block 1 returned is not only given to the next blocks",
    "block weight": "asks a block of another stage for 'linear'",
    "attribute": "sets 'number' of a block of another stage",
    "skips": "'inlet.weight'.* is used behind the blocks, but belongs",
    "early weight late": "'inlet.bias'.* is used behind the blocks, but belongs",
    "leaves out": "block 3 is called when 2 blocks have been",
    "stops": "ended before its block 3|not only given to the next blocks",
    "repeats": "block 1 is called when 2 blocks have been",
    "repeats 3": "block 3 is called when 4 blocks have been",
    "returns early": "'inlet.weight'.* is used behind the blocks, but belongs",
}


@pytest.mark.parametrize("what", BRANCHES)
@pytest.mark.parametrize("cuts", [["blocks.1", "blocks.3"], ["blocks.2"]], ids=str)
def test_a_branch_that_cannot_be_followed_is_refused_when_it_is_taken(
    what: str, cuts: list[str]
) -> None:
    short, long = batches_of(4, 3), batches_of(4, 3, 6)
    found = trained(Branches(what), short, cuts=cuts).state_dict()
    assert_same_bits(found, plain(Branches(what), short))
    with pytest.raises(OffbeatError, match=BRANCHES[what]):
        trained(Branches(what), long, cuts=cuts)
    trainer = trained(Branches(what), short, cuts=cuts)
    with pytest.raises(OffbeatError, match=BRANCHES[what]):
        trainer.evaluate(long)
