"""The zoo: parameter counts by formula, shapes, cuts, and data that only the seed decides."""

import sys

import pytest
import torch
from torch import nn

from offbeat.cut import operation_counts, plan_cut
from offbeat.errors import BatchError, ConfigurationError, OffbeatError
from offbeat.zoo import batches, digits, digits_cnn, resnet
from offbeat.zoo.resnet import BasicBlock


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def resnet_parameters(depth: int, classes: int = 10, channels: int = 3) -> int:
    """By hand: 9 weights per pair of channels, 2 per BatchNorm channel, no shortcut weights."""
    n = (depth - 2) // 6
    first = 9 * channels * 16 + 2 * 16
    group_16 = 2 * n * (9 * 16 * 16 + 2 * 16)
    group_32 = 9 * 16 * 32 + (2 * n - 1) * 9 * 32 * 32 + 2 * n * 2 * 32
    group_64 = 9 * 32 * 64 + (2 * n - 1) * 9 * 64 * 64 + 2 * n * 2 * 64
    return first + group_16 + group_32 + group_64 + 64 * classes + classes


def test_resnet_20_has_the_published_number_of_parameters() -> None:
    assert parameters(resnet(20)) == 269_722


@pytest.mark.parametrize("depth", [8, 20, 32, 44, 56, 110])
def test_resnet_parameters_follow_the_formula(depth: int) -> None:
    assert parameters(resnet(depth)) == resnet_parameters(depth)


def test_resnet_takes_other_classes_and_channels() -> None:
    model = resnet(8, classes=7, channels=1)
    assert parameters(model) == resnet_parameters(8, classes=7, channels=1)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("depth", [8, 20, 56])
def test_resnet_has_as_many_weighted_layers_as_its_depth(depth: int) -> None:
    weighted = [m for m in resnet(depth).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(weighted) == depth


@pytest.mark.parametrize(("depth", "ppv"), [(20, 7), (56, 19), (110, 37)])
def test_the_papers_ppv_cuts_after_the_16_channel_group(depth: int, ppv: int) -> None:
    """PPV = 2n+1: conv, bn, relu and n blocks stay in the first stage."""
    cut = plan_cut(resnet(depth), ppv=(ppv,))
    assert cut.places == (3 + (depth - 2) // 6,)
    first, second = cut.modules()
    activation = first(torch.zeros(2, 3, 8, 8))
    assert activation.shape == (2, 16, 8, 8)
    assert second(activation).shape == (2, 10)


@pytest.mark.parametrize(
    ("depth", "hint"), [(18, "14 and 20"), (21, "20 and 26"), (101, "98 and 104"), (2, "is 8")]
)
def test_resnet_refuses_other_depths_with_words(depth: int, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"6n\+2.*{hint}"):
        resnet(depth)


def test_the_shortcut_subsamples_and_pads_with_zero_channels() -> None:
    """With a residual of zero the block is its shortcut, and pixels are picked, not averaged."""
    block = BasicBlock(16, 32).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    output = block(x)
    assert torch.equal(output[:, :16], x[:, :, ::2, ::2])
    assert torch.equal(output[:, 16:], torch.zeros(2, 16, 4, 4))


def test_resnet_convolutions_start_from_hes_distribution() -> None:
    torch.manual_seed(0)
    last = [m for m in resnet(20).modules() if isinstance(m, nn.Conv2d)][-1]
    assert float(last.weight.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


def test_digits_cnn_makes_four_stages_of_about_equal_cost() -> None:
    model = digits_cnn()
    x = torch.zeros(4, 1, 8, 8)
    assert model(x).shape == (4, 10)
    assert 10_000 < parameters(model) < 100_000
    cut = plan_cut(model, stages=4).weighed(x)
    costs = operation_counts(cut.modules(), x)
    assert len(costs) == 4
    assert max(costs) < 1.2 * min(costs)
    assert all(any(True for _ in module.parameters()) for module in cut.modules())


# ---------------------------------------------------------------------------- data


def test_digits_are_split_whole_and_normalised_by_the_training_part() -> None:
    x_train, y_train, x_test, y_test = digits(seed=3)
    assert x_train.shape == (1438, 1, 8, 8)
    assert x_test.shape == (359, 1, 8, 8)
    assert (len(y_train), len(y_test)) == (1438, 359)
    assert float(x_train.mean()) == pytest.approx(0, abs=1e-5)
    assert float(x_train.std()) == pytest.approx(1, abs=1e-5)
    assert set(y_train.tolist()) == set(y_test.tolist()) == set(range(10))


def test_the_same_seed_gives_the_same_split_and_another_another() -> None:
    torch.manual_seed(1)
    once = digits(seed=0)
    torch.manual_seed(2)
    again, other = digits(seed=0), digits(seed=1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[1], other[1])


def test_digits_leave_the_callers_generator_alone() -> None:
    before = torch.get_rng_state()
    x, y, _, _ = digits()
    list(batches(x, y, 64, seed=0, epoch=0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_that_leaves_a_part_empty_is_refused(share: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        digits(test_share=share)


def test_missing_scikit_learn_is_answered_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(OffbeatError, match=r'pip install "offbeat\[data\]"'):
        digits()


def test_batches_hold_every_row_once_and_keep_the_short_last_one() -> None:
    x, y = torch.arange(10.0).unsqueeze(1), torch.arange(10)
    found = list(batches(x, y, 4, seed=0, epoch=0))
    assert [len(rows) for rows, _ in found] == [4, 4, 2]
    assert all(torch.equal(rows.squeeze(1).long(), targets) for rows, targets in found)
    seen = torch.cat([targets for _, targets in found])
    assert sorted(seen.tolist()) == list(range(10))
    assert seen.tolist() != list(range(10))


def test_batches_are_keyed_by_seed_and_epoch() -> None:
    x = y = torch.arange(50)

    def order(seed: int, epoch: int) -> list[int]:
        return [int(row) for rows, _ in batches(x, y, 50, seed=seed, epoch=epoch) for row in rows]

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize(("size", "targets"), [(0, 4), (2, 3)])
def test_batches_refuse_what_cannot_be_cut(size: int, targets: int) -> None:
    with pytest.raises(BatchError, match="as many targets as inputs"):
        next(batches(torch.zeros(4), torch.zeros(targets), size, seed=0, epoch=0))
