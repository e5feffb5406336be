"""Every method against an oracle written from its paper, which shares no code with the library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from helpers import OPTIMIZERS, Factory, mlp, trained, vector_batches
from offbeat.methods import (
    ADL,
    DDG,
    DGL,
    DSP,
    FDG,
    METHODS,
    FeaturesReplay,
    GPipe,
    Method,
    OneFOneB,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)

Weights = list[list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A method, and the oracle with the settings the paper's table gives it for K stages."""

    method: Callable[[int], Method]
    oracle: Callable[..., Weights]
    settings: Callable[[int], dict[str, Any]]


def one_way(stages: int) -> list[int]:
    return [stages - 1 - k for k in range(stages)]


def both_ways(stages: int) -> list[int]:
    return [2 * (stages - 1 - k) for k in range(stages)]


CASES = {
    "synchronous": Case(lambda K: Synchronous(), oracles.bp, lambda K: {}),
    "gpipe": Case(lambda K: GPipe(3), oracles.bp, lambda K: {"accumulate": 3}),
    "1f1b": Case(lambda K: OneFOneB(5), oracles.bp, lambda K: {"accumulate": 5}),
    "1f1b-few": Case(lambda K: OneFOneB(2), oracles.bp, lambda K: {"accumulate": 2}),
    "pipedream": Case(lambda K: PipeDream(), oracles.stash, lambda K: {"lags": one_way(K)}),
    "pipedream-accumulated": Case(
        lambda K: PipeDream(accumulate=2),
        oracles.stash,
        lambda K: {"lags": one_way(K), "accumulate": 2},
    ),
    "pipedream-current": Case(
        lambda K: PipeDream(backward="current"), oracles.current, lambda K: {"lags": one_way(K)}
    ),
    "pipedream-2bw": Case(
        lambda K: PipeDream2BW(), oracles.two_buffered, lambda K: {"accumulate": K}
    ),
    "pipedream-2bw-more": Case(
        lambda K: PipeDream2BW(accumulate=5), oracles.two_buffered, lambda K: {"accumulate": 5}
    ),
    "ddg": Case(lambda K: DDG(), oracles.stash, lambda K: {"lags": one_way(K)}),
    "features-replay": Case(
        lambda K: FeaturesReplay(), oracles.recompute, lambda K: {"lags": one_way(K)}
    ),
    "fdg": Case(lambda K: FDG(), oracles.stash, lambda K: {"lags": both_ways(K)}),
    "fdg-shrinking": Case(
        lambda K: FDG(beta=0.7), oracles.stash, lambda K: {"lags": both_ways(K), "beta": 0.7}
    ),
    "stale-weights": Case(
        lambda K: StaleWeights(), oracles.current, lambda K: {"lags": both_ways(K)}
    ),
    "stale-weights-accumulated": Case(
        lambda K: StaleWeights(accumulate=3),
        oracles.current,
        lambda K: {"lags": both_ways(K), "accumulate": 3},
    ),
    "stale-weights-recompute": Case(
        lambda K: StaleWeights(backward="recompute"),
        oracles.recompute,
        lambda K: {"lags": both_ways(K)},
    ),
    "adl": Case(lambda K: ADL(2), oracles.stash, lambda K: {"lags": both_ways(K), "accumulate": 2}),
    "adl-4": Case(
        lambda K: ADL(), oracles.stash, lambda K: {"lags": both_ways(K), "accumulate": 4}
    ),
    "adl-sum": Case(
        lambda K: ADL(3, reduction="sum"),
        oracles.stash,
        lambda K: {"lags": both_ways(K), "accumulate": 3, "reduction": "sum"},
    ),
    "adl-current": Case(
        lambda K: ADL(2, backward="current"),
        oracles.current,
        lambda K: {"lags": both_ways(K), "accumulate": 2},
    ),
    "dsp": Case(lambda K: DSP(), oracles.recompute, lambda K: {"lags": both_ways(K)}),
    "dsp-slack": Case(
        lambda K: DSP(hop=2),
        oracles.recompute,
        lambda K: {"lags": [4 * (K - 1 - k) for k in range(K)]},
    ),
    "dsp-lag-at-the-last-stage": Case(
        lambda K: DSP(lag=tuple(3 * (K - 1 - k) + 1 for k in range(K))),
        oracles.recompute,
        lambda K: {"lags": [3 * (K - 1 - k) + 1 for k in range(K)]},
    ),
    "dsp-stash": Case(
        lambda K: DSP(lag=tuple(3 * (K - 1 - k) + 1 for k in range(K)), backward="stash"),
        oracles.stash,
        lambda K: {"lags": [3 * (K - 1 - k) + 1 for k in range(K)]},
    ),
    "dsp-current": Case(
        lambda K: DSP(lag=tuple(3 * (K - 1 - k) + 1 for k in range(K)), backward="current"),
        oracles.current,
        lambda K: {"lags": [3 * (K - 1 - k) + 1 for k in range(K)]},
    ),
}


def compare(
    method: Method, oracle: Callable[..., Weights], stages: int, seed: int, optimizer: Factory,
    **settings: Any,
) -> None:  # fmt: skip
    """Trains one random network both ways and compares every parameter of every stage."""
    network, inputs, classes = oracles.random_network(seed, stages)
    batches = oracles.random_batches(seed, 12, 7, inputs, classes, last_rows=5)
    loss = nn.functional.cross_entropy
    expected = oracle(network, batches, loss, optimizer, **settings)
    trainer = trained(network, batches, method, optimizer)
    for stage, weights in zip(trainer.model.children(), expected, strict=True):
        for ours, theirs in zip(stage.parameters(), weights, strict=True):
            # float64: rules and lags differ by 1e-7 and more, rounding by 1e-15.
            torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_method_equals_its_oracle(name: str, stages: int, optimizer: str) -> None:
    case = CASES[name]
    seed = stages + 10 * list(OPTIMIZERS).index(optimizer)  # every combination its own network
    compare(
        case.method(stages), case.oracle, stages, seed, OPTIMIZERS[optimizer],
        **case.settings(stages),
    )  # fmt: skip


@pytest.mark.parametrize("rule", ["stash", "current"])
def test_the_oracle_of_models_in_one_piece_is_that_of_their_stages(rule: str) -> None:
    network, inputs, classes = oracles.random_network(5, 3)
    batches = oracles.random_batches(5, 8, 6, inputs, classes, last_rows=4)
    loss, lags = nn.functional.cross_entropy, [4, 2, 0]
    expected = getattr(oracles, rule)(network, batches, loss, OPTIMIZERS["momentum"], lags)
    model = nn.Sequential(*network)
    names = [[f"{k}.{n}" for n, _ in stage.named_parameters()] for k, stage in enumerate(network)]
    found = oracles.whole(
        rule, model, names, batches, loss, OPTIMIZERS["momentum"], lags, lambda model, x: model(x)
    )
    theirs = [values for stage in expected for values in stage]
    for ours, values in zip(found.parameters(), theirs, strict=True):
        torch.testing.assert_close(ours.detach(), values, rtol=0, atol=1e-12)


def test_every_method_has_an_oracle() -> None:
    tested = {type(case.method(2)) for case in CASES.values()} | {DGL}
    missing = [kind.name for kind in METHODS if kind not in tested]
    assert not missing, f"no oracle for {missing}: add a case of each to CASES in {__file__}"


def by_class(_x: Tensor, y: Tensor) -> int:
    """A weight that differs from part to part."""
    return 1 + int(y.sum())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("accumulate", "weight"), [(1, None), (2, None), (2, by_class)])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_dgl_equals_its_oracle(stages: int, accumulate: int, weight: Any, optimizer: str) -> None:
    network, inputs, classes = oracles.random_network(stages, stages)
    batches = oracles.random_batches(stages, 6, 6, inputs, classes, last_rows=4)
    torch.manual_seed(3)
    widths = [inputs]
    x = batches[0][0]
    for module in network:
        x = module(x)
        widths.append(x.shape[1])
    heads = [nn.Linear(width, classes).double() for width in widths[1:-1]]
    unused = copy.deepcopy(heads)
    method = DGL(head=lambda activation, output: unused.pop(0), accumulate=accumulate)
    expected = oracles.local_losses(
        network,
        batches,
        nn.functional.cross_entropy,
        OPTIMIZERS[optimizer],
        heads=list(heads),
        accumulate=accumulate,
        **({} if weight is None else {"weigh": weight}),
    )
    trainer = trained(network, batches, method, OPTIMIZERS[optimizer], weight=weight)
    for stage, weights in zip(trainer.model.children(), expected, strict=True):
        for ours, theirs in zip(stage.parameters(), weights, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "K2", "K3"),
    [
        (Synchronous(), (0.53389066, 0.53844429), (0.52473905, 0.52797360, 0.52878511)),
        (StaleWeights(), (0.53433491, 0.53846605), (0.52512059, 0.52781662, 0.52835033)),
        (FDG(), (0.53433491, 0.53846605), (0.52489744, 0.52781659, 0.52835030)),
        (PipeDream(), (0.53420420, 0.53845718), (0.52477215, 0.52792407, 0.52854389)),
        (
            PipeDream(backward="current"),
            (0.53420420, 0.53845718),
            (0.52492861, 0.52792454, 0.52854442),
        ),
        (DSP(), (0.53423343, 0.53846608), (0.52496447, 0.52780106, 0.52835031)),
    ],
)
def test_published_vectors(method: Method, K2: tuple[float, ...], K3: tuple[float, ...]) -> None:
    """A scalar chain of tanh stages, eight batches, then a drain."""
    for expected in (K2, K3):
        stages = []
        for k in range(len(expected)):
            layer = nn.Linear(1, 1, bias=False).double()
            nn.init.constant_(layer.weight, 0.5)
            stages.append(nn.Sequential(layer, *([nn.Tanh()] if k < len(expected) - 1 else [])))
        x = torch.tensor([1, -0.5, 0.25, 0.75, -1, 0.5, 0.1, -0.2], dtype=torch.float64)
        batches = [(value.view(1, 1), 0.5 * value.view(1, 1)) for value in x]
        trainer = trained(
            stages, batches, method, OPTIMIZERS["sgd"], loss=lambda a, y: 0.5 * ((a - y) ** 2).sum()
        )
        for ours, theirs in zip(trainer.state_dict().values(), expected, strict=True):
            assert abs(float(ours) - theirs) < 1e-8


# ------------------------------------------------------------------ a program that is two settings


class NAdamWithWeightStashing(torch.optim.Optimizer):
    """The optimizer of Ajanthan et al. 2025 (arXiv 2505.01099), written out.

    Their program (github.com/sukrucildirr/AsyncPP, a copy: optim/nadamw.py at commit 6abffa0) puts
    torch's 'NAdam' with ``decoupled_weight_decay`` into PipeDream's weight stashing. With psi the
    momentum decay and mu_t = beta1 (1 - 0.5 * 0.96^(t psi)):

        w <- w (1 - eta lambda);  m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
        m^ = mu_(t+1) m / (1 - P_(t+1)) + (1 - mu_t) g / (1 - P_t),  P_t = mu_1 mu_2 ... mu_t
        w <- w - eta m^ / (sqrt(v / (1 - beta2^t)) + eps)
    """

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], decay: float) -> None:
        super().__init__(params, {"lr": lr})
        self._lr, self._betas, self._decay = lr, betas, decay
        self._t, self._product = 0, 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (beta1, beta2), psi = self._betas, 0.004
        self._t += 1
        now = beta1 * (1 - 0.5 * 0.96 ** (self._t * psi))
        then = beta1 * (1 - 0.5 * 0.96 ** ((self._t + 1) * psi))
        self._product *= now
        for w in self.param_groups[0]["params"]:
            own = self.state.setdefault(w, {"m": torch.zeros_like(w), "v": torch.zeros_like(w)})
            w *= 1 - self._lr * self._decay
            own["m"] = beta1 * own["m"] + (1 - beta1) * w.grad
            own["v"] = beta2 * own["v"] + (1 - beta2) * w.grad**2
            ahead = then * own["m"] / (1 - self._product * then)
            ahead = ahead + (1 - now) * w.grad / (1 - self._product)
            w -= self._lr * ahead / ((own["v"] / (1 - beta2**self._t)).sqrt() + 1e-8)


@pytest.mark.parametrize("stages", [2, 4])
def test_pipedream_with_nadam_is_the_program_of_ajanthan_et_al(stages: int) -> None:
    """Without a correction: NAdam looks ahead by itself."""
    network, batches = mlp(), vector_batches(12)
    cuts = [2, 4, 6][: stages - 1]
    ends = [0, *cuts, len(network)]
    parts = [nn.Sequential(*list(network)[a:b]) for a, b in pairwise(ends)]
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.99, 0.999)}

    def nadam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(params, **settings, weight_decay=0.01, decoupled_weight_decay=True)

    def theirs(params: Any) -> torch.optim.Optimizer:
        return NAdamWithWeightStashing(params, **settings, decay=0.01)

    ours = trained(network, batches, PipeDream(), nadam, cuts=cuts).state_dict()
    found = list(ours.values())
    loss = nn.functional.cross_entropy
    expected = [
        [w for own in oracles.stash(parts, batches, loss, made, one_way(stages)) for w in own]
        for made in (nadam, theirs)
    ]
    assert all(map(torch.equal, found, expected[0]))
    # torch holds the product of the mu_t in single precision
    assert all(
        torch.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(found, expected[1], strict=True)
    )
    plain = [w for own in oracles.stash(parts, batches, loss, nadam, [0] * stages) for w in own]
    assert max(float((a - b).abs().max()) for a, b in zip(found, plain, strict=True)) > 1e-3
