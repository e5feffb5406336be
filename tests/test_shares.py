"""Parts of a batch count as much as what their loss is a mean over: rows, labels or ``weight=``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jobs
import offbeat
import oracles
from helpers import OPTIMIZERS, assert_same_bits, mlp, trained, vector_batches
from jobs import counted_tokens, padded_batches, token_loss, token_net, weighted_trainer
from offbeat.averaging import AllReduce, DaSGD, LocalSGD
from offbeat.errors import BatchError, ConfigurationError
from offbeat.methods import ADL, DSP, GPipe, Method, OneFOneB, PipeDream, Synchronous

MODEL = token_net()
BATCHES = padded_batches(4)


def by_hand(
    batches: Sequence[Any],
    parts: int,
    count: Callable[[Tensor, Tensor], Any] = counted_tokens,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
) -> tuple[nn.Module, list[float]]:
    """Accumulates parts, each by its share of what the batch counts; passes over empty ones."""
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    losses = []
    for x, y in batches:
        pieces = list(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True))
        counts = [float(count(*piece)) for piece in pieces]
        total = 0.0
        for (xs, ys), own in zip(pieces, counts, strict=True):
            if own:
                term = loss(model(xs), ys) * (own / sum(counts))
                term.backward()
                total += term.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return model, losses


def train(
    batches: Sequence[Any], method: Any, **settings: Any
) -> tuple[offbeat.Trainer, list[Any]]:
    trainer = weighted_trainer(method, **settings)
    losses = [trainer.step(x, y) for x, y in trainer.batches(batches)]
    return trainer, [*losses, *trainer.flush()]


def test_the_batches_would_show_a_share_by_rows() -> None:
    by_rows, _ = by_hand(BATCHES, 4, lambda x, _: len(x))
    by_tokens, _ = by_hand(BATCHES, 4)
    whole, _ = by_hand(BATCHES, 1)
    assert distance(by_rows, whole) > 1e-3
    assert distance(by_tokens, whole) < 1e-12


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "method",
    [
        GPipe(4),
        OneFOneB(4),
        *(DSP(lag=(0, 0), backward=r, accumulate=4) for r in offbeat.methods.RULES),
    ],
    ids=str,
)
def test_without_lag_it_is_the_loop_with_the_same_weights(method: Method) -> None:
    expected, losses = by_hand(BATCHES, 4)
    trainer, ours = train(BATCHES, method)
    assert_same_bits(trainer.state_dict(), expected.state_dict())
    assert [float(loss) for loss in ours] == pytest.approx(losses, rel=1e-12)
    whole, of_whole = by_hand(BATCHES, 1)
    assert distance(trainer.model, whole) < 1e-12
    assert losses == pytest.approx(of_whole, rel=1e-9)


@pytest.mark.parametrize(
    ("method", "lags"), [(ADL(3), [4, 2, 0]), (PipeDream(accumulate=2), [2, 1, 0])]
)
def test_late_parts_go_by_the_share_of_their_own_batch(method: Any, lags: list[int]) -> None:
    layers = list(MODEL)
    stages = [nn.Sequential(*part) for part in (layers[:1], layers[1:3], layers[3:])]
    expected = oracles.stash(
        stages,
        BATCHES,
        token_loss,
        OPTIMIZERS["momentum"],
        lags,
        method.accumulate,
        weigh=lambda x, y: int(counted_tokens(x, y)),
    )
    trainer, _ = train(BATCHES, method, cuts=[1, 3])
    flat = [values for stage in expected for values in stage]
    assert all(map(torch.equal, trainer.state_dict().values(), flat))


def test_a_sum_over_parts_stays_a_sum() -> None:
    trainer, losses = train(BATCHES, ADL(2, reduction="sum"), cuts=[1, 3])
    rows, _ = train(BATCHES, ADL(2, reduction="sum"), cuts=[1, 3], weight="rows")
    assert_same_bits(trainer.state_dict(), rows.state_dict())
    first = by_hand(BATCHES[:1], 2)[1][0]
    assert float(next(loss for loss in losses if loss is not None)) == pytest.approx(first)


# ------------------------------------------------------------------------- models with a loss


class OwnLoss(nn.Module):
    """As Hugging Face's: a list of blocks, labels among its arguments, a loss among its outputs."""

    def __init__(self, loss_type: str) -> None:
        super().__init__()
        self.loss_type = loss_type
        torch.manual_seed(2)
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 9)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if self.loss_type == "ForCausalLM":
            labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return {"loss": token_loss(logits, labels), "logits": logits}


def own_loss(output: dict[str, Tensor], _: Tensor) -> Tensor:
    return output["loss"]


@pytest.mark.parametrize("kind", ["ForCausalLM", "ForMaskedLM"])
@pytest.mark.parametrize(("replicas", "parts"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_labels_of_a_model_with_a_loss_of_its_own_are_counted(
    kind: str, replicas: int, parts: int
) -> None:
    data = [({"ids": x, "labels": y}, y) for x, y in BATCHES]
    whole = OwnLoss(kind)
    optimizer = OPTIMIZERS["momentum"](whole.parameters())
    for x, _ in data:
        whole(**x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    model = OwnLoss(kind)
    trainer = offbeat.Trainer(
        model, loss=own_loss, optimizer=OPTIMIZERS["momentum"], method=GPipe(parts),
        cuts=["blocks.2"], replicas=replicas,
    )  # fmt: skip
    for x, y in data:
        trainer.step(x, y)
    trainer.flush()
    assert distance(model, whole) < 1e-12
    with torch.no_grad():
        counts = [(y[:, 1:] if kind == "ForCausalLM" else y).ne(-100).sum() for _, y in BATCHES]
        losses = [whole(**x)["loss"] * n for (x, _), n in zip(data, counts, strict=True)]
    expected = float(sum(losses) / sum(counts))
    assert trainer.evaluate(data).loss == pytest.approx(expected, rel=1e-9)


def test_a_model_that_takes_its_mean_over_something_else_is_not_trained() -> None:
    """Its labels are shifted, and nothing says so."""
    model = OwnLoss("ForCausalLM")
    trainer = offbeat.Trainer(
        model, loss=own_loss, optimizer=OPTIMIZERS["sgd"], method=GPipe(4), cuts=["blocks.2"]
    )
    object.__setattr__(trainer._pipeline.setup.weight, "shifted", False)
    before = copy.deepcopy(model.state_dict())
    x, y = BATCHES[0]
    with pytest.raises(BatchError, match=r"mean over \d+ targets.*counts \d+ \(labels\)"):
        trainer.step({"ids": x, "labels": y}, y)
    assert_same_bits(model.state_dict(), before)


@pytest.mark.filterwarnings("default")  # what transformers warns of is its own affair
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_hugging_face_models_train_as_on_the_whole_batch(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    more = {"intermediate_size": 32, "max_position_embeddings": 16, "tie_word_embeddings": False}
    if name.startswith("GPT2"):
        sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
        more = {"tie_word_embeddings": False, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    elif name.startswith("Bert"):
        more |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, **more)).double().train()
    for module in model.modules():  # what ties weights in spite of the configuration
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias = nn.Parameter(module.bias.detach().clone())
    ids, labels = padded_batches(1, words=32)[0]
    batch = {"input_ids": ids, "labels": labels}
    whole = copy.deepcopy(model)
    step = OPTIMIZERS["sgd"](whole.parameters())
    whole(**batch).loss.backward()
    step.step()
    blocks = {"G": "transformer.h", "L": "model.layers", "B": "bert.encoder.layer"}[name[0]]
    trainer = offbeat.Trainer(
        model, loss=lambda output, _: output.loss, optimizer=OPTIMIZERS["sgd"], method=GPipe(4),
        cuts=[f"{blocks}.1"],
    )  # fmt: skip
    trainer.step(batch, labels)
    assert distance(model, whole) < 1e-12


# ------------------------------------------------------------------------- replicas


def left_by_hand(batches: Sequence[Any], dies: int, at: int) -> nn.Module:
    """Three replicas of which one is missing from batch ``at`` on: the total is of who is left."""
    model = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for number, (x, y) in enumerate(batches):
        thirds = list(zip(x.chunk(3), y.chunk(3), strict=True))
        if number >= at:
            del thirds[dies]
        total = sum(int(counted_tokens(*third)) for third in thirds)
        found = []
        for xs, ys in thirds:
            for part, target in zip(xs.chunk(2), ys.chunk(2), strict=True):
                scale = int(counted_tokens(part, target)) * len(thirds) / total
                (token_loss(model(part), target) * scale).backward()
            found.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for p, *gradients in zip(model.parameters(), *found, strict=True):
            p.grad = sum(gradients[1:], start=gradients[0]) / len(thirds)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.timeout(120)
def test_the_total_is_of_the_replicas_that_are_left() -> None:
    batches = [(x[1:7], y[1:7]) for x, y in padded_batches(5)]
    found = offbeat.launch(jobs.outlive_weighted, 3, 1, 2, batches, timeout_s=100, go_on=True)
    assert found[1] is None
    for state in (found[0], found[2]):
        assert_same_bits(state, left_by_hand(batches, 1, 2).state_dict())


def replicas_by_hand(batches: Sequence[Any], parts: int, every: int | None) -> nn.Module:
    """Two replicas by hand: gradients averaged over all that counts, or weights every so often."""
    models = [copy.deepcopy(MODEL) for _ in range(2)]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    for number, (x, y) in enumerate(batches):
        total = int(counted_tokens(x, y))
        for model, xs, ys in zip(models, x.chunk(2), y.chunk(2), strict=True):
            own = int(counted_tokens(xs, ys))
            for part, target in zip(xs.tensor_split(parts), ys.tensor_split(parts), strict=True):
                count = int(counted_tokens(part, target))
                scale = count * 2 / total if every is None else count / own
                if scale:
                    (token_loss(model(part), target) * scale).backward()
        pairs = list(zip(models[0].parameters(), models[1].parameters(), strict=True))
        if every is None:
            for one, other in pairs:
                assert one.grad is not None
                assert other.grad is not None
                one.grad = (one.grad + other.grad) / 2
                other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if every is not None and (number + 1) % every == 0:
            with torch.no_grad():
                for one, other in pairs:
                    one.copy_((one + other) / 2)
                    other.copy_(one)
    return models[0]


@pytest.mark.parametrize("parts", [1, 2])
def test_replicas_that_average_gradients_go_by_the_total_of_all(parts: int) -> None:
    expected = replicas_by_hand(BATCHES, parts, None)
    trainer, losses = train(
        BATCHES, GPipe(parts), replicas=2, averaging=AllReduce(), optimizer="sgd"
    )
    assert_same_bits(trainer.state_dict(), expected.state_dict())
    x, y = BATCHES[0]
    with torch.no_grad():
        assert float(losses[0]) == pytest.approx(float(token_loss(MODEL(x), y)), rel=1e-12)
    whole = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["sgd"](whole.parameters())
    for x, y in BATCHES:
        token_loss(whole(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(trainer.model, whole) < 1e-12


def test_replicas_that_average_weights_go_by_their_own() -> None:
    expected = replicas_by_hand(BATCHES, 2, 2)
    settings = {"replicas": 2, "averaging": LocalSGD(every=2), "optimizer": "sgd"}
    trainer, _ = train(BATCHES, GPipe(2), **settings)
    assert_same_bits(trainer.state_dict(), expected.state_dict())
    warmed, _ = train(
        BATCHES[:2], GPipe(2), **settings | {"averaging": LocalSGD(every=2, warmup=9)}
    )
    assert_same_bits(warmed.state_dict(), replicas_by_hand(BATCHES[:2], 2, None).state_dict())


PROCESSES: list[dict[str, Any]] = [
    {"method": ADL(2), "replicas": 1},
    {"method": GPipe(2), "replicas": 2, "averaging": AllReduce()},
    {"method": ADL(2), "replicas": 2, "averaging": DaSGD(every=2, delay=1)},
    {"method": GPipe(2), "replicas": 4, "averaging": AllReduce()},
]


@pytest.mark.timeout(120)
def test_processes_give_the_bits_of_one() -> None:
    """Gaps among the tokens, an empty part and, with two replicas, numbers between processes."""
    for processes, replicas in ((2, 1), (4, 2), (2, 4)):
        settings = [each for each in PROCESSES if each["replicas"] == replicas]
        found = offbeat.launch(jobs.train_weighted, processes, settings, timeout_s=100)
        for place, each in enumerate(settings):
            alone = jobs.train_weighted([each])[0]
            for of_rank in found:
                assert_same_bits(of_rank[place]["state"], alone["state"])
                if replicas == 1:
                    assert of_rank[place]["losses"] == alone["losses"]
                    assert of_rank[place]["evaluation"] == alone["evaluation"]


# ------------------------------------------------------------------------- parts without weight


def masked_mean(output: Tensor, y: Tensor) -> Tensor:
    """No number, and neither its gradient, where nothing counts."""
    counts = y != -100
    each = -output.log_softmax(2).gather(2, y.clamp(min=0)[..., None])[..., 0]
    return (each * counts).sum() / counts.sum()


def with_empty_part(number: int, parts: int) -> list[Any]:
    batches = []
    for x, y in padded_batches(6):
        y = y.clone()
        y.tensor_split(parts)[number][:] = -100
        batches.append((x, y))
    return batches


@pytest.mark.parametrize("number", [0, 3])
def test_a_part_that_counts_nothing_adds_nothing(number: int) -> None:
    batches = with_empty_part(number, 4)
    expected, losses = by_hand(batches, 4, loss=masked_mean)
    for method in (GPipe(4), OneFOneB(4), DSP(lag=(0, 0), backward="recompute", accumulate=4)):
        trainer, ours = train(batches, method, loss=masked_mean, guards=offbeat.Guards(), clip=1e9)
        assert_same_bits(trainer.state_dict(), expected.state_dict())
        assert [float(loss) for loss in ours] == pytest.approx(losses, rel=1e-12)
    for late in (ADL(4), PipeDream(accumulate=4), DSP(accumulate=4, backward="current")):
        trainer, ours = train(batches, late, loss=masked_mean, cuts=[1, 3])
        assert all(value.isfinite().all() for value in trainer.state_dict().values())
        assert all(math.isfinite(loss) for loss in ours if loss is not None)


def test_a_batch_that_counts_nothing_is_refused_before_it_begins() -> None:
    x, y = BATCHES[0]
    trainer = weighted_trainer(GPipe(4))
    with pytest.raises(BatchError, match="nothing in this batch counts"):
        trainer.step(x, torch.full_like(y, -100))
    with pytest.raises(BatchError, match="nothing in this batch counts"):
        trainer.evaluate([(x, torch.full_like(y, -100))])


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (torch.tensor(math.nan), "nan"),
        (torch.tensor(True), "True"),
        (torch.ones(3), "a tensor of shape \\(3,\\)"),
        (1j, "1j"),
        ("12", "'12'"),
        (None, "None"),
    ],
)
def test_what_is_no_weight_is_refused_before_the_batch_begins(given: Any, shown: str) -> None:
    trainer = weighted_trainer(GPipe(2), weight=lambda _x, _y: given)
    before = trainer.state_dict()
    with pytest.raises(BatchError, match=f"gave {shown} for part 0 of 2 of a batch: return one"):
        trainer.check_batch(*BATCHES[0])
    with pytest.raises(BatchError, match=f"gave {shown} for part 0 of 2"):
        trainer.step(*BATCHES[0])
    with pytest.raises(BatchError, match="of batch 0 of evaluate"):
        trainer.evaluate(BATCHES[:1])
    assert_same_bits(trainer.state_dict(), before)
    trainer._pipeline.refuse_if_stopped()


@pytest.mark.parametrize("given", [3, "tokens", [1]])
def test_a_weight_is_a_function_or_rows(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="weight=.*give a function"):
        weighted_trainer(GPipe(2), weight=given)


@pytest.mark.parametrize(
    "kind", [int, float, np.float32, torch.tensor, lambda n: torch.tensor([n])]
)
def test_any_real_number_is_a_weight(kind: Any) -> None:
    trainer, _ = train(BATCHES, GPipe(4), weight=lambda x, y: kind(int(counted_tokens(x, y))))
    assert_same_bits(trainer.state_dict(), by_hand(BATCHES, 4)[0].state_dict())


# ------------------------------------------------------------------------- what is noticed


def class_loss(output: Tensor, y: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 3, 9, dtype=torch.float64)
    return nn.functional.cross_entropy(output.flatten(0, 1), y.clamp(min=0).flatten(), weights)


@pytest.mark.parametrize("loss", [token_loss, class_loss, lambda o, y: 2 * token_loss(o, y) + 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mean_over_other_than_rows_is_not_taken_by_rows(loss: Any, replicas: int) -> None:
    method = GPipe(4) if replicas == 1 else Synchronous()
    trainer = weighted_trainer(method, weight=None, loss=loss, replicas=replicas)
    before = trainer.state_dict()
    with pytest.raises(BatchError, match=r"is a mean over .* \(rows\).*weight=lambda x, y"):
        trainer.step(*BATCHES[0])
    assert_same_bits(trainer.state_dict(), before)
    rows, _ = train(BATCHES, GPipe(4), weight="rows", loss=loss)
    by_rows, _ = by_hand(BATCHES, 4, lambda x, _: len(x), loss)
    assert_same_bits(rows.state_dict(), by_rows.state_dict())


def test_a_mean_is_looked_at_where_its_graph_is_built_late() -> None:
    trainer = weighted_trainer(DSP(lag=(2, 1), accumulate=2), weight=None, cuts=[1])
    with pytest.raises(BatchError, match=r"is a mean over .* \(rows\)"):
        for x, y in BATCHES[:4]:
            trainer.step(x, y)


def test_batches_after_a_flush_are_compared_with_themselves() -> None:
    """All of a class, then all of another: what each part counts fits within each batch."""
    weights = torch.tensor([1.0, 2.0])
    trainer = offbeat.Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        loss=lambda output, y: nn.functional.cross_entropy(output, y, weights),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        method=GPipe(2),
        cuts=[1],
    )
    for number in (0, 1):
        trainer.step(torch.randn(8, 3), torch.full((8,), number))
        trainer.flush()


def test_one_part_is_plain_training_whatever_its_loss_is_over() -> None:
    trainer, _ = train(BATCHES, Synchronous(), weight=None)
    assert_same_bits(trainer.state_dict(), by_hand(BATCHES, 1)[0].state_dict())


def test_a_function_that_counts_something_else_is_named_once(caplog: Any) -> None:
    train(BATCHES, GPipe(4), weight=lambda x, _: len(x))
    assert [record.message.count("(function)") for record in caplog.records] == [1]
    caplog.clear()
    train(BATCHES, GPipe(4))
    assert not caplog.records


def info_nce(output: Tensor, y: Tensor) -> Tensor:
    rows = nn.functional.normalize(output, dim=1)
    return nn.functional.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(y)).flip(0))


def batch_hard(output: Tensor, y: Tensor) -> Tensor:
    apart = (output[:, None] - output).square().sum(2)
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    return (apart.masked_fill(~same, 0).amax(1) - apart.masked_fill(same, 1e9).amin(1) + 1).mean()


def with_spread(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y) + 0.1 * output.var(0).mean()


def smooth(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, label_smoothing=0.1)


def distilled(output: Tensor, y: Tensor) -> Tensor:
    target = nn.functional.one_hot(y, 4).double().softmax(1)
    return nn.functional.kl_div(output.log_softmax(1), target, reduction="batchmean")


def squares(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, nn.functional.one_hot(y, 4).double())


@pytest.mark.parametrize(
    "method", [GPipe(2), ADL(2), DSP(accumulate=2, backward="current")], ids=str
)
@pytest.mark.parametrize(
    ("loss", "compares"),
    [
        (info_nce, True),
        (batch_hard, True),
        (with_spread, True),
        (lambda o, y: squares(o, y).sqrt(), True),
        (squares, False),
        (smooth, False),
        (distilled, False),
        (lambda o, y: nn.functional.nll_loss(o.log_softmax(1), y), False),
        (lambda o, y: (o.abs() ** 1.5).mean(), False),
    ],
)
def test_a_loss_that_compares_rows_is_named_and_called_no_more_often(
    loss: Any, compares: bool, method: Any, caplog: Any
) -> None:
    calls = 0

    def counted(output: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        term: Tensor = loss(output, y)
        return term

    states = []
    for weight in (None, "rows"):
        calls = 0
        trainer = trained(
            mlp(), vector_batches(3, 12), method, cuts=[2, 4], loss=counted, weight=weight
        )
        assert calls == 6
        states.append(trainer.state_dict())
    assert_same_bits(states[0], states[1])
    named = [record.message for record in caplog.records if "compares the rows" in record.message]
    assert len(named) == compares


# ------------------------------------------------------------------------- stopping and going on


@pytest.mark.parametrize("method", [ADL(2), ADL(4), PipeDream(accumulate=2)], ids=str)
def test_an_exact_checkpoint_in_the_middle_of_batches_keeps_their_shares(
    tmp_path: Path, method: Any
) -> None:
    batches = padded_batches(8)
    whole, losses = train(batches, method, cuts=[1, 3])
    first = weighted_trainer(method, cuts=[1, 3])
    early = [first.step(x, y) for x, y in batches[:4]]
    first.save(tmp_path, wait=True)
    second = weighted_trainer(method, cuts=[1, 3])
    assert second.resume(tmp_path).step == 4
    late = [second.step(x, y) for x, y in batches[4:]]
    assert [*early, *late, *second.flush()] == losses
    assert_same_bits(second.state_dict(), whole.state_dict())


def test_evaluation_goes_by_what_counts() -> None:
    trainer = weighted_trainer(GPipe(2))
    x, y = (torch.cat(part) for part in zip(*BATCHES, strict=True))
    with torch.no_grad():
        expected = float(token_loss(MODEL(x), y))
    empty = (BATCHES[0][0], torch.full_like(BATCHES[0][1], -100))
    assert trainer.evaluate([*BATCHES, empty]).loss == pytest.approx(expected, rel=1e-12)
    trainer.step(*BATCHES[0])  # the stages are made, the weights others
    by_rows = weighted_trainer(GPipe(2), weight="rows").evaluate(BATCHES).loss
    assert by_rows != pytest.approx(expected, rel=1e-4)
