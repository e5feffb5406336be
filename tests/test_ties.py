"""Weights that several stages use: they belong to the first, and every rule keeps its promise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import jobs
import offbeat
import tie_oracle
from architectures import GPT, T5, Architecture, decoder, translator
from checkpoint_jobs import METHODS, assert_same_end, interrupted, interrupted_all
from helpers import (
    OPTIMIZERS,
    Batch,
    assert_same_bits,
    plain_loop,
    trained,
    trainer_for,
    vector_batches,
)
from offbeat import nest
from offbeat.averaging import LocalSGD
from offbeat.checkpoints import tensorfile
from offbeat.corrections import Monitor, Predict
from offbeat.errors import ConfigurationError, IncompleteModel, StageError
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    FDG,
    GPipe,
    Method,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)
from offbeat.stages.flight import Work
from offbeat.stages.network import Network
from offbeat.transport.base import Key
from offbeat.transport.link import Connection

CUTS = ([2], [2, 5], [2, 5, 7])


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return jobs.tied_net().to(dtype)


def batches(count: int = 6, dtype: torch.dtype = torch.float64) -> list[Batch]:
    return vector_batches(count, rows=8, dtype=dtype)


# ------------------------------------------------------------------ zero lag


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize(("parts", "clip"), [(1, None), (4, None), (3, 0.5)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_lag_the_bits_are_those_of_a_plain_loop(
    optimizer: str, parts: int, clip: float | None, cuts: list[int]
) -> None:
    model, data = network(torch.float32), batches(dtype=torch.float32)
    steps = OPTIMIZERS[optimizer]
    expected, _ = plain_loop(model, data, steps, micro_batches=parts, clip=clip)
    method = Synchronous() if parts == 1 else GPipe(parts)
    ours = trained(model, data, method, steps, cuts=cuts, clip=clip)
    assert_same_bits(ours.state_dict(), dict(expected.state_dict()))


# ------------------------------------------------------------------ with lag, by hand


def one_way(stages: int, stage: int) -> int:
    return stages - 1 - stage


def both_ways(stages: int, stage: int) -> int:
    return 2 * (stages - 1 - stage)


Lag = Callable[[int, int], int]
CASES: dict[str, tuple[Method, str, Lag, int]] = {
    "pipedream": (PipeDream(), "stash", one_way, 1),
    "pipedream-4": (PipeDream(accumulate=4), "stash", one_way, 4),
    "pipedream-current": (PipeDream(backward="current"), "current", one_way, 1),
    "stale-weights": (StaleWeights(), "current", both_ways, 1),
    "stale-weights-4": (StaleWeights(accumulate=4), "current", both_ways, 4),
    "stale-weights-recompute": (StaleWeights(backward="recompute"), "recompute", both_ways, 1),
    "dsp-4": (DSP(accumulate=4), "recompute", both_ways, 4),
    "adl": (ADL(4), "stash", both_ways, 4),
    "fdg": (FDG(beta=0.7), "stash", both_ways, 1),
    "pipedream-2bw": (PipeDream2BW(accumulate=4), "stash", one_way, 4),
}


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("name", CASES)
def test_every_rule_equals_its_oracle(name: str, optimizer: str, cuts: list[int]) -> None:
    method, rule, lag, parts = CASES[name]
    model, data, count = network(), batches(), len(cuts) + 1

    def read(stage: int, i: int) -> int:
        if isinstance(method, PipeDream2BW):
            return max(0, i // parts - 1)
        return max(0, i - lag(count, stage)) // parts

    ends = [0, *cuts, len(model)]
    stages = [model[a:b] for a, b in pairwise(ends)]
    expected = tie_oracle.train(
        stages, data, nn.functional.cross_entropy, OPTIMIZERS[optimizer], rule=rule, read=read,
        parts=parts, beta=0.7 if name == "fdg" else 1.0,
    )  # fmt: skip
    ours = trained(model, data, method, OPTIMIZERS[optimizer], cuts=cuts).state_dict()
    for key, parameter in model.named_parameters(remove_duplicate=False):
        # float64: rules and lags differ by 1e-7 and more, rounding by 1e-15.
        torch.testing.assert_close(ours[key], expected[id(parameter)], rtol=0, atol=1e-12)


# ------------------------------------------------------------------ any way to cut


class Recurs(nn.Module):
    """Recurrent layers keep their weights in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x.unsqueeze(1))[0].squeeze(1)
        return output


class Recurrent(nn.Sequential):
    def __init__(self) -> None:
        first, last = Recurs(), Recurs()
        last.lstm.weight_hh_l0 = first.lstm.weight_hh_l0
        last.lstm.weight_ih_l0 = first.lstm.weight_ih_l0
        super().__init__(first, nn.Tanh(), last)


class Ties(jobs.Tower):
    """The weight of one end is that of the other, and a block's is another block's."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet = nn.Linear(6, 6)
        self.outlet.weight = self.inlet.weight
        self.blocks[3].linear.weight = self.blocks[0].linear.weight  # type: ignore[union-attr]


class CallsTwice(jobs.Tower):
    """A module of one end works at the other as well."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x) + self.inlet(torch.zeros(6)).sum()
        return logits


class Multiplies(jobs.Tower):
    """The other end uses the weight and calls nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.inlet.weight


class Shares(nn.Module):
    """No list of blocks, and a parameter of its own in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.stem, self.first, self.second = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.stem(x) * self.gain))
        logits: Tensor = self.second(hidden * self.gain) * self.gain
        return logits


MODELS: dict[type[nn.Module], list[Any]] = {
    Recurrent: [1],
    Ties: ["blocks.1", "blocks.3"],
    CallsTwice: ["blocks.2"],
    Multiplies: ["blocks.1", "blocks.2"],
    Shares: ["first", "second"],
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # the plain loop draws its numbers elsewhere
            module.p = 0.0
    return model


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_every_cut_has_the_bits_of_a_plain_loop(kind: type[nn.Module], parts: int) -> None:
    data = batches(dtype=torch.float32)
    expected, _ = plain_loop(made(kind), data, micro_batches=parts)  # type: ignore[arg-type]
    method = Synchronous() if parts == 1 else GPipe(parts)
    ours = trained(made(kind), data, method, cuts=MODELS[kind])  # type: ignore[arg-type]
    assert_same_bits(ours.state_dict(), dict(expected.state_dict()))
    if kind is Shares and parts > 1:  # a record takes one shape
        return
    assert ours.evaluate(data).loss == pytest.approx(loss_of(expected, data), rel=1e-6)


def loss_of(model: nn.Module, data: list[Batch]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(model(x), y)) for x, y in data]
    return sum(losses) / len(losses)


# ------------------------------------------------------------------ what reads and stores weights


def test_the_newest_are_evaluated_and_have_all_their_names() -> None:
    data = batches(dtype=torch.float32)
    trainer = trainer_for(network(torch.float32), StaleWeights(), cuts=[2, 5, 7])
    for x, y in data:
        trainer.step(x, y)
    state = trainer.state_dict()
    assert list(state) == list(trainer.model.state_dict())
    assert state["0.weight"] is state["9.weight"]
    model = network(torch.float32)
    model.load_state_dict(state)
    assert trainer.evaluate(data).loss == pytest.approx(loss_of(model, data), rel=1e-6)


@pytest.mark.parametrize("method", [m for m in METHODS if not isinstance(m, DGL)], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, method: Method) -> None:
    assert_same_end(*interrupted(tmp_path / "one", "ties", method, 6, cuts=[2, 5]))
    if isinstance(method, StaleWeights):
        settings = {"replicas": 2, "averaging": LocalSGD(2)}
        assert_same_end(*interrupted(tmp_path / "two", "ties", method, 6, cuts=[2, 5], **settings))


def wide(width: int = 64) -> nn.Sequential:
    """Two uses of one weight with little between them."""
    torch.manual_seed(0)
    first, last = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, width), last)


@pytest.mark.parametrize("rule", ["stash", "current", "recompute"])
def test_a_version_in_transit_is_stored_once(tmp_path: Path, rule: Any) -> None:
    method = StaleWeights(accumulate=4, backward=rule)
    trainer = trainer_for(wide(), method, cuts=[1, 2, 3, 4])
    for _ in range(6):
        trainer.step(torch.randn(4, 64), torch.randint(64, (4,)))
    path = trainer.save(tmp_path, wait=True)
    state = tensorfile.read(path / "replica-0-stage-1.safetensors")
    works = [flight["work"] for flight in state["stage"]["flights"]]
    inputs = [nest.tensors([work["given"], work["leaves"], work["saved"]]) for work in works]
    values = [t for of_work in inputs for t in of_work if t.shape == (64, 64)]
    numbers = [flight["batch"] for flight in state["stage"]["flights"]]
    entries = [entry for entry in trainer.ledger if (entry.kind, entry.stage) == ("F", 0)]
    read = {entry.version for entry in entries if entry.batch in numbers}
    assert len(works) == 6 > len(read) == 2
    assert len({tensor.data_ptr() for tensor in values}) == len(read)


# ------------------------------------------------------------------ refused, or for nothing


def test_without_gradients_from_later_stages_ties_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"weight '0.weight' of stage 0.*untie"):
        trained(network(), batches(1), DGL(), cuts=[2, 5])


def test_a_forward_that_writes_a_tied_weight_is_refused() -> None:
    def model() -> nn.Sequential:
        first, last = nn.Embedding(6, 6, max_norm=0.5), nn.Linear(6, 6)
        last.weight = first.weight
        return nn.Sequential(first, nn.Flatten(), nn.Linear(36, 6), last)

    data = [(torch.arange(6).repeat(4, 1), torch.arange(4))]
    with pytest.raises(StageError, match="writes into a weight that several stages use"):
        trained(model(), data, StaleWeights(), cuts=[2])


def test_a_module_that_keeps_a_reference_of_its_own_is_refused() -> None:
    class Keeps(nn.Linear):
        def tie(self, weight: nn.Parameter) -> Keeps:
            self.weight = weight
            self.kept = [weight]
            return self

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.kept[0]

    model = network(torch.float32)
    model[5] = Keeps(6, 6).tie(model.get_parameter("0.weight"))
    with pytest.raises(StageError, match=r"'0.weight' belongs to an earlier stage"):
        trained(model, batches(1, torch.float32), Synchronous(), cuts=[2, 5])


def test_a_frozen_weight_is_every_stage_s_own() -> None:
    model, data = network(torch.float32), batches(dtype=torch.float32)
    model[0].weight.requires_grad_(False)
    ours = trained(model, data, StaleWeights(), cuts=[4])
    state = ours.state_dict()
    assert torch.equal(state["0.weight"], model.get_parameter("0.weight"))
    sent = ours._engine.workers[0].stage.network.shared
    assert not sent


# ------------------------------------------------------------------ without


def test_untied_every_use_has_a_weight_of_its_own() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(network(torch.float32), shared, nn.Tanh(), shared)
    x = torch.randn(3, 6)
    before, tied = model(x), dict(model.named_parameters(remove_duplicate=False))
    assert offbeat.untie(model) is model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert list(parameters) == list(tied)
    assert len(set(map(id, parameters.values()))) == len(parameters)
    assert parameters["0.0.weight"] is tied["0.0.weight"]
    assert torch.equal(model(x), before)
    data = batches(dtype=torch.float32)
    expected, _ = plain_loop(model, data)
    ours = trained(model, data, Synchronous(), cuts=[1, 3])
    assert_same_bits(ours.state_dict(), dict(expected.state_dict()))


# ------------------------------------------------------------------ in processes


def ends_in_rows(
    replicas: int, methods: list[Method], cuts: list[int]
) -> list[tuple[dict[str, Any], float]]:
    """How each of these runs ends, and what it is worth half-way."""
    ends = []
    for method in methods:
        averaging = None if replicas == 1 else LocalSGD(2)
        trainer = trainer_for(
            network(torch.float32), method, OPTIMIZERS["adamw"], cuts=cuts, replicas=replicas,
            averaging=averaging,
        )  # fmt: skip
        data = batches(8, torch.float32)
        for x, y in trainer.batches(data[:4]):
            trainer.step(x, y)
        if trainer.rank % (len(cuts) + 1):  # it has been lent the weight, which is stage 0's
            with pytest.raises(IncompleteModel, match="belongs to stage 0"):
                trainer.model.get_parameter("0.weight").sum()
        value = trainer.evaluate(data[:2]).loss
        for x, y in trainer.batches(data[4:]):
            trainer.step(x, y)
        trainer.flush()
        with torch.no_grad():  # by hand; of replicas here only the first would be
            trainer.model.get_parameter("0.weight").mul_(0.5 if replicas == 1 else 1.0)
        ends.append((trainer.state_dict(), value + trainer.evaluate(data[:2]).loss))
    return ends


EACH_RULE: list[Method] = [
    Synchronous(), GPipe(4), PipeDream(), StaleWeights(), StaleWeights(accumulate=4),
    StaleWeights(backward="recompute"), PipeDream2BW(accumulate=4), ADL(4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "cuts", "methods"),
    [(1, [5], EACH_RULE), (1, [1, 2, 5], EACH_RULE[4:7]), (2, [5], EACH_RULE[3:5])],
    ids=["two", "four", "replicas"],
)
def test_processes_give_the_bits_of_one(
    replicas: int, cuts: list[int], methods: list[Method]
) -> None:
    alone = ends_in_rows(replicas, methods, cuts)
    count = replicas * (len(cuts) + 1)
    for of_rank in offbeat.launch(ends_in_rows, count, replicas, methods, cuts, timeout_s=100):
        for (ours, value), (theirs, expected) in zip(of_rank, alone, strict=True):
            assert_same_bits(ours, theirs)
            assert value == expected


def traffic(method: Method) -> tuple[list[int], int]:
    """How often each stage has sent the values of a weight onwards, and gradients of it back."""
    sent = dict.fromkeys(("activation", "gradient", "evaluation"), 0)
    put = Connection.put

    def counted(connection: Connection, key: Key, message: Any) -> None:
        if key.what in sent:
            sent[key.what] += sum(t.shape == (64, 64) for t in nest.tensors(message))
        put(connection, key, message)

    with patch.object(Connection, "put", counted):
        trainer = trainer_for(wide(), method, cuts=[1, 3, 4])
        data = [(torch.randn(8, 64), torch.randint(64, (8,))) for _ in range(6)]
        for x, y in trainer.batches(data):
            trainer.step(x, y)
        trainer.flush()
        for _ in range(2):
            trainer.evaluate(data[:3])
    versions = {e.version for e in trainer.ledger if (e.kind, e.stage) == ("F", 0)}
    return list(sent.values()), len(versions)


@pytest.mark.parametrize(("method", "parts"), [(StaleWeights(), 1), (ADL(4), 4)], ids=str)
def test_a_version_is_sent_once_and_a_gradient_per_part(method: Method, parts: int) -> None:
    every = offbeat.launch(traffic, 4, method, timeout_s=100)
    for rank, (sent, versions) in enumerate(every):
        forth, back = rank < 3, rank > 0
        assert sent == [versions * forth, 6 * parts * back, 2 * forth], rank
    assert versions < 6 or parts == 1


def test_versions_under_way_are_counted_where_they_are() -> None:
    """Stage 1 only passes the weight on, and holds it for every batch until that comes back."""
    trainer = trainer_for(wide(), PipeDream(), cuts=[1, 3, 4])
    for _ in range(8):
        trainer.step(torch.randn(8, 64), torch.randint(64, (8,)))
    weight = 64 * 64 * 4
    held = [stage.in_flight_bytes for stage in trainer.memory()]
    assert 2 * weight <= held[1] < 3 * weight  # between two steps, two batches are on their way


def test_processes_resume_with_the_same_bits(tmp_path: Path) -> None:
    for number, (replicas, averaging) in enumerate([(1, None), (2, LocalSGD(2))]):
        settings = {"cuts": [5], "replicas": replicas, "averaging": averaging}
        runs = [
            ("ties", m, 4, settings) for m in (StaleWeights(), PipeDream(), PipeDream2BW(), DSP())
        ]
        folder = str(tmp_path / str(number))
        for of_rank in offbeat.launch(interrupted_all, 2 * replicas, folder, runs, timeout_s=100):
            for ours, theirs in of_rank:
                assert_same_end(ours, theirs)


# ------------------------------------------------------------------ what travels


@pytest.mark.parametrize("rule", ["stash", "current", "recompute"])
@pytest.mark.parametrize("kind", ["newest", "predicted", "older"])
def test_what_arrives_is_what_the_owner_s_forward_has_read(kind: str, rule: Any) -> None:
    """Predictions and older versions, too, and until the last stage has done with them."""
    read: dict[tuple[int, int], dict[str, Tensor]] = {}
    forward = Network.forward

    def watched(network: Network, batch: int, work: Work, given: Any, **settings: Any) -> Any:
        result = forward(network, batch, work, given, **settings)
        if network.index == 0:
            (weight,) = network.shared
            read[0, batch] = {"0.weight": weight.detach().clone()}
        else:
            read[network.index, batch] = given.ties  # as it is when all is over
        return result

    method: Method = StaleWeights(accumulate=2, backward=rule)
    if kind == "older":
        method = PipeDream2BW(backward=rule)
    corrections = [Predict()] if kind == "predicted" else []
    data = batches(8, torch.float32)
    model = wide(6)
    with patch.object(Network, "forward", watched):
        trainer = trained(model, data, method, cuts=[1, 4], corrections=corrections)
    numbers = [batch for stage, batch in read if stage == 0]
    assert len(numbers) >= 16
    for batch in numbers:
        for stage in (1, 2):
            assert torch.equal(read[stage, batch]["0.weight"], read[0, batch]["0.weight"])
    newest = trainer.state_dict()["0.weight"]
    assert not any(torch.equal(values["0.weight"], newest) for values in read.values())


def test_a_probe_goes_through_all_uses() -> None:
    trainer = trainer_for(
        network(torch.float32), StaleWeights(), cuts=[2, 5], monitor=Monitor(every=2, probe=True)
    )
    data = batches(6, torch.float32)
    for x, y in data:
        trainer.step(x, y)
    found = trainer.probe(*data[0])
    assert sorted(found) == [0, 1, 2]
    assert all(-1 <= value <= 1.00001 for value in found.values())
    trainer.flush()
    assert trainer.probe(*data[0]) == pytest.approx(dict.fromkeys(range(3), 1.0))


@pytest.mark.parametrize("cuts", [[4], [1, 2, 8], None], ids=str)
def test_a_drained_checkpoint_passes_to_a_cut_with_other_owners(
    tmp_path: Path, cuts: list[int] | None
) -> None:
    data = batches(8, torch.float32)
    whole = trained(network(torch.float32), data[:4], Synchronous(), cuts=[2, 5])
    whole.save(tmp_path, drain=True, wait=True)
    settings = {"stages": 1} if cuts is None else {"cuts": cuts}
    again = trainer_for(network(torch.float32), Synchronous(), **settings)
    assert again.resume(tmp_path).step == 4
    for trainer in (whole, again):
        for x, y in data[4:]:
            trainer.step(x, y)
    assert_same_bits(again.state_dict(), whole.state_dict())


# ------------------------------------------------------------------ other people's models

LANGUAGE = {
    "gpt2": decoder("GPT2LMHeadModel", GPT, config="GPT2Config", tie_word_embeddings=True),
    "t5": translator("T5ForConditionalGeneration", T5, num_layers=4, tie_word_embeddings=True),
}


def parts_of(case: Architecture) -> list[tuple[Any, Tensor]]:
    return [(x, y) for x, y in case.batches() if len(y) == 4]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", LANGUAGE)
def test_tied_language_models_train_as_they_come(kind: str, parts: int, stages: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    case = LANGUAGE[kind]
    model, method = case.make(), Synchronous() if parts == 1 else GPipe(parts)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for x, y in parts_of(case):
        optimizer.zero_grad()
        for part, target in zip(nest.split(x, parts), y.tensor_split(parts), strict=True):
            loss = case.loss(model(**part, use_cache=False), target)
            (loss if parts == 1 else loss / parts).backward()
        optimizer.step()
    trainer = offbeat.Trainer(
        case.make(), loss=case.loss, optimizer=OPTIMIZERS["adamw"], method=method, stages=stages
    )
    for x, y in parts_of(case):
        trainer.step(x, y)
    assert_same_bits(trainer.state_dict(), dict(model.state_dict()))


def ends_of_language_models(replicas: int, stages: int) -> list[dict[str, Any]]:
    ends = []
    for case in LANGUAGE.values():
        for method in EACH_RULE:
            trainer = offbeat.Trainer(
                case.make(), loss=case.loss, optimizer=OPTIMIZERS["adamw"], method=method,
                stages=stages, replicas=replicas,
            )  # fmt: skip
            twice = [
                ({n: torch.cat([t, t.flip(0)]) for n, t in x.items()}, torch.cat([y, y.flip(0)]))
                for x, y in parts_of(case)
            ]
            for x, y in trainer.batches(twice):
                trainer.step(x, y)
            trainer.flush()
            ends.append(trainer.state_dict())
    return ends


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("replicas", "stages"), [(1, 2), (1, 4), (2, 2)])
def test_tied_language_models_in_processes(replicas: int, stages: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    alone = ends_of_language_models(replicas, stages)
    count = replicas * stages
    for states in offbeat.launch(ends_of_language_models, count, replicas, stages):
        for ours, theirs in zip(states, alone, strict=True):
            assert_same_bits(ours, theirs)
