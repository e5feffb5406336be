"""The zoo: parameter counts by formula, shapes, cuts, and data that only the seed decides."""

import math
import re
import sys

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat.cutting.costs import count_operations
from offbeat.cutting.ways import plan_cut
from offbeat.errors import BatchError, ConfigurationError, OffbeatError
from offbeat.zoo import (
    NETWORKS,
    alexnet,
    batches,
    data_named,
    digits,
    digits_cnn,
    gpt,
    lenet5,
    mlp,
    network,
    network_for,
    resnet,
    resnet18,
    settings_of,
    vgg16,
    wrn28_10,
)
from offbeat.zoo.data.text import token_loss
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
    first, second = cut.modules
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
    cut = plan_cut(model, stages=4).decide(x)
    costs = count_operations(cut.modules, x)
    assert len(costs) == 4
    assert max(costs) < 1.2 * min(costs)
    assert all(any(True for _ in module.parameters()) for module in cut.modules)


# ---------------------------------------------------------------------------- other networks


def conv(narrow: int, wide: int, side: int, bias: int = 1) -> int:
    return narrow * wide * side * side + bias * wide


def linear(narrow: int, wide: int) -> int:
    return narrow * wide + wide


def test_lenet5_alexnet_and_vgg16_have_the_papers_parameters() -> None:
    """61.7 k, 23.3 M and 15.245 M in the notes on the StaleWeights paper; here layer by layer."""
    lenet = conv(1, 6, 5) + conv(6, 16, 5) + linear(400, 120) + linear(120, 84) + linear(84, 10)
    assert parameters(lenet5()) == lenet == 61_706
    convs = ((3, 64), (64, 192), (192, 384), (384, 256), (256, 256))
    head = linear(1024, 4096) + linear(4096, 4096) + linear(4096, 10)
    with torch.device("meta"):
        assert parameters(alexnet()) == sum(conv(*c, 3) for c in convs) + head == 23_272_266
        assert parameters(vgg16()) == 14_714_688 + 2 * linear(512, 512) + linear(512, 10)
        assert parameters(vgg16()) == 15_245_130


@pytest.mark.parametrize("depth", [98, 164, 224, 362])
def test_the_papers_deep_resnets_are_of_the_same_kind(depth: int) -> None:
    with torch.device("meta"):
        model = resnet(depth)
    assert parameters(model) == resnet_parameters(depth)
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules()) == depth


def test_resnet18_and_wrn28_10_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        assert parameters(resnet18()) == 11_173_962
        assert parameters(wrn28_10()) == 36_479_194


def wide_parameters(classes: int, channels: int) -> int:
    total, narrow = 9 * channels * 16, 16
    for wide in (160, 320, 640):
        total += 2 * narrow + 9 * narrow * wide + 2 * wide + 9 * wide * wide + narrow * wide
        total += 3 * (2 * wide + 9 * wide * wide + 2 * wide + 9 * wide * wide)
        narrow = wide
    return total + 2 * 640 + linear(640, classes)


def test_wrn_parameters_follow_the_formula_and_28_layers_are_beside_three_shortcuts() -> None:
    with torch.device("meta"):
        model = wrn28_10(classes=100, channels=1)
    assert parameters(model) == wide_parameters(100, 1)
    # 25 convolutions and a linear layer in the trunk, three 1x1 in shortcuts; "28" counts those.
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules()) == 26 + 3


@pytest.mark.parametrize(
    "name", [n for n in NETWORKS if not re.search(r"mlp|gpt|\d\d\d|t[3-9]", n)]
)
def test_every_image_network_is_flat_and_gives_a_row_of_classes(name: str) -> None:
    shape = {"digits-cnn": (1, 8, 8), "lenet5": (1, 28, 28)}.get(name, (3, 32, 32))
    with torch.device("meta"):
        model = network(name, classes=7)
        value = torch.zeros(2, *shape)
        for layer in model:
            value = layer(value)
            assert isinstance(value, Tensor)
    assert value.shape == (2, 7)


@pytest.mark.parametrize(
    ("build", "ppv", "place", "shape", "between"),
    [
        (lenet5, 2, 7, (1, 28, 28), (400,)),
        (alexnet, 3, 8, (3, 32, 32), (384, 4, 4)),
        (vgg16, 2, 5, (3, 32, 32), (64, 16, 16)),
        (lambda: resnet(20), 7, 6, (3, 32, 32), (16, 32, 32)),
    ],
)
def test_the_papers_four_stage_placements(
    build: object, ppv: int, place: int, shape: tuple[int, ...], between: tuple[int, ...]
) -> None:
    """What has no weights stays with the weighted layer before it."""
    assert callable(build)
    with torch.device("meta"):
        model = build()
    cut = plan_cut(model, ppv=(ppv,))
    with torch.device("meta"):
        first, second = (module.to("meta") for module in cut.modules)
        activation = first(torch.zeros(2, *shape))
        assert activation.shape == (2, *between)
        assert second(activation).shape == (2, 10)
    assert cut.places == (place,)
    weighted = [m for m in first.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(weighted) == ppv


@pytest.mark.parametrize(("build", "layers"), [(lenet5, 5), (alexnet, 8), (vgg16, 16)])
def test_a_stage_can_end_after_every_weighted_layer(build: object, layers: int) -> None:
    assert callable(build)
    with torch.device("meta"):
        model = build()
    cut = plan_cut(model, ppv=range(1, layers))
    assert cut.stages == layers


def test_networks_take_other_sides_and_refuse_those_that_leave_nothing() -> None:
    with torch.device("meta"):
        assert lenet5(side=32)(torch.zeros(1, 1, 32, 32)).shape == (1, 10)
        assert alexnet(side=28, channels=1)(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
        assert alexnet(side=15)(torch.zeros(1, 3, 15, 15)).shape == (1, 10)
        assert vgg16(side=64)(torch.zeros(1, 3, 64, 64)).shape == (1, 10)
    for build, side in ((lenet5, 11), (alexnet, 14), (vgg16, 28)):
        with pytest.raises(ConfigurationError, match=f"side={side}.*at least"):
            build(side=side)


def test_mlp_has_the_widths_it_was_given() -> None:
    model = mlp(12, hidden=(5, 6), classes=3)
    assert parameters(model) == linear(12, 5) + linear(5, 6) + linear(6, 3)
    assert model(torch.zeros(2, 3, 2, 2)).shape == (2, 3)
    assert not isinstance(model[-1], nn.ReLU)
    with pytest.raises(ConfigurationError, match="at least 1"):
        mlp(12, hidden=(0,))


# ---------------------------------------------------------------------------- the transformer


def gpt_parameters(vocabulary: int, context: int, layers: int, width: int) -> int:
    block = 12 * width * width + 13 * width
    return 2 * vocabulary * width + context * width + layers * block + 2 * width


def test_gpt_parameters_follow_the_formula() -> None:
    assert parameters(gpt(65, 16, 2, 24, 3)) == gpt_parameters(65, 16, 2, 24)
    with torch.device("meta"):
        small = parameters(gpt(50_257, 1024, 12, 768, 12))
    assert small == 124_439_808 + 50_257 * 768  # GPT-2's published number, and a head of its own


def test_gpt_children_are_embedding_blocks_norm_and_head() -> None:
    model = gpt(65, 16, 3, 24, 3)
    names = [type(child).__name__ for child in model]
    assert names == ["Embedding", "Block", "Block", "Block", "LayerNorm", "Linear"]


def test_gpt_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = gpt(11, 8, 2, 16, 2)
    tokens = torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 8, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    assert model(tokens[:, :4]).shape == (3, 4, 11)


def test_gpt_starts_as_gpt_2_does() -> None:
    torch.manual_seed(0)
    model = gpt(500, 64, 8, 128, 4)
    state = model.state_dict()
    assert float(state["0.token.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(state["1.attention.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(state["1.wide_out.weight"].std()) == pytest.approx(0.02 / 4, rel=0.02)
    assert float(state["8.attention_out.weight"].std()) == pytest.approx(0.02 / 4, rel=0.02)
    assert not state["3.wide.bias"].any()


def test_gpt_refuses_what_does_not_divide_and_rows_that_are_too_long() -> None:
    with pytest.raises(ConfigurationError, match=r"width=30, heads=4.*next one is 32"):
        gpt(65, 16, 2, 30, 4)
    with pytest.raises(ConfigurationError, match="layers=0"):
        gpt(65, 16, layers=0)
    with pytest.raises(ConfigurationError, match="9 tokens.*context of 8"):
        gpt(11, 8, 1, 16, 2)(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("method", ["stale-weights", "adl", "dsp"])
def test_gpt_trains_in_stages(method: str) -> None:
    """Nothing in it is computed from weights alone, which StaleWeights would refuse."""
    torch.manual_seed(0)
    trainer = offbeat.Trainer(
        gpt(7, 6, 2, 16, 2, dropout=0.1),
        loss=token_loss,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.005),
        method=method,
        stages=3,
    )
    tokens = (torch.arange(7).repeat(4, 1) + torch.arange(4)[:, None]) % 7
    x, y = tokens[:, :-1], tokens[:, 1:]
    for _ in range(60):
        trainer.step(x, y)
    trainer.flush()
    assert trainer.evaluate([(x, y)]).loss < 1.5 < math.log(7)


# ---------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", ["resnet20", "ResNet-20", "resnet_20", "ResNet 20"])
def test_hyphens_and_capitals_do_not_matter(name: str) -> None:
    assert parameters(network(name)) == 269_722


@pytest.mark.parametrize("name", ["Digits", "di-gits", "di_gits", "di gits"])
def test_they_do_not_matter_in_names_of_data_either(name: str) -> None:
    assert data_named(name).name == "digits"


def test_other_cifar_resnets_work_by_name_and_wrong_names_are_answered() -> None:
    assert parameters(network("resnet-8")) == resnet_parameters(8)
    with pytest.raises(ConfigurationError, match="unknown network 'resnet50'.*Did you mean 'resn"):
        network("resnet50")
    with pytest.raises(ConfigurationError, match="Did you mean 'lenet5'.*Known: digits-cnn, mlp"):
        network("lenet")


def test_wrong_and_missing_settings_are_answered() -> None:
    with pytest.raises(ConfigurationError, match="setting of network gpt.*Did you mean 'width'"):
        network("gpt", vocabulary=5, context=4, widht=8)
    with pytest.raises(ConfigurationError, match="gpt needs vocabulary and context"):
        network("gpt")
    assert settings_of("lenet5") == {"classes": 10, "channels": 1, "side": 28}
    assert settings_of("gpt")["vocabulary"] is ...


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("resnet20", {"classes": "x"}, "network resnet20: classes='x': give a whole number."),
        ("resnet20", {"channels": 1.5}, "network resnet20: channels=1.5: give a whole number."),
        ("resnet20", {"channels": -1}, "channels=-1: give a whole number of at least 1."),
        ("vgg16", {"classes": 0}, "network vgg16: classes=0: give a whole number of at least 1."),
        ("mlp", {"hidden": 32}, "network mlp: hidden=32: give whole numbers, as in (1,2)."),
        ("mlp", {"hidden": (3, "x")}, "network mlp: hidden=(3, 'x'): give whole numbers"),
        ("wrn28-10", {"dropout": 1.5}, "network wrn28-10: dropout=1.5: give a share from 0 to 1."),
        ("alexnet", {"dropout": "x"}, "network alexnet: dropout='x': give a number."),
        ("gpt", {"vocabulary": 5, "context": 4, "dropout": 3}, "dropout=3: give a share from 0"),
    ],
)
def test_settings_of_a_wrong_type_are_answered(
    name: str, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        network(name, **settings)
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        network_for(data_named("digits"), name, **settings)


def test_a_network_is_fitted_to_the_data_or_refused() -> None:
    data = data_named("digits")
    state = torch.get_rng_state()
    model = network_for(data, "resnet8")
    torch.set_rng_state(state)
    same = resnet(8, classes=10, channels=1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)
    )
    with pytest.raises(ConfigurationError, match="gpt needs vocabulary and context"):
        network_for(data, "gpt")
    with pytest.raises(ConfigurationError, match=r"does not fit data 'digits'.*\(1, 8, 8\)"):
        network_for(data, "gpt", vocabulary=3, context=4)
    with pytest.raises(ConfigurationError, match="does not fit"):
        network_for(data, "mlp", classes=3)
    with pytest.raises(ConfigurationError, match=r"lenet5\(side=8\)"):
        network_for(data, "lenet5")
    with pytest.raises(ConfigurationError, match="network lenet5 cannot be made with .*side=1000"):
        network_for(data, "lenet5", side=10**20)


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
    with pytest.raises(OffbeatError, match=r"pip install scikit-learn"):
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
