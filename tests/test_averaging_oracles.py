"""The averaging oracles against numbers computed apart, and the identities between the methods.

local SGD              DaSGD with d = 0, xi = 0
Cooperative SGD        DaSGD with d = 0: X <- X W, W = xi I + (1 - xi) J (arXiv 1808.07576)
Overlap-Local-SGD      DaSGD with d = tau, xi = 1 - alpha, where beta = 0
CoCoD-SGD              the corrected merge with d = tau, xi = 0
Streaming DiLoCo       DaSGD with xi = alpha, where P = 1 and the outer step is plain SGD, lr 1
DiLoCo                 local SGD, where the outer step is plain SGD, lr 1
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from averaging_oracles import (
    Gradient,
    History,
    all_reduce,
    co2,
    cocod,
    corrected_dasgd,
    dasgd,
    diloco,
    eager_diloco,
    local_sgd,
    mean,
    overlap_local_sgd,
    post_local_sgd,
    streaming_diloco,
)

LR = 0.1
STEPS = 24


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def toy_starts() -> list[Tensor]:
    return [vector(0.0), vector(1.0)]


def toy_gradient(replica: int, k: int, x: Tensor) -> Tensor:
    return x - (1.0, 3.0)[replica]


def rich_gradient(replica: int, k: int, x: Tensor) -> Tensor:
    """Nonlinear, different on every replica and every step, and a function of its arguments."""
    phase = torch.arange(x.numel(), dtype=torch.float64) + 1.7 * replica + 0.9 * k
    return x - (replica + 1.0) + 0.3 * torch.sin(3 * x) + torch.cos(phase)


def rich_starts(count: int, *, equal: bool) -> list[Tensor]:
    base = vector(0.3, -0.8, 1.1, 0.05, -0.4)
    return [base + (0.0 if equal else 0.37 * i) for i in range(count)]


def linear(slope: float) -> Gradient:
    return lambda replica, k, x: slope * x


def constant(value: float) -> Gradient:
    return lambda replica, k, x: torch.full_like(x, value)


def largest_gap(left: History, right: History) -> float:
    assert len(left) == len(right)
    return max(
        float((a - b).abs().max())
        for row_a, row_b in zip(left, right, strict=True)
        for a, b in zip(row_a, row_b, strict=True)
    )


def assert_same(left: History, right: History) -> None:
    assert largest_gap(left, right) <= 1e-12


def assert_differ(left: History, right: History) -> None:
    """Guards the identities: the setting that should matter does."""
    assert largest_gap(left, right) > 1e-3


# m = 2 replicas with gradients x - c, c = (1, 3), from x = (0, 1), eta = 0.1: the weights after
# step k and its merge, by a program apart. They start unequal on purpose.
VECTORS: dict[str, dict[int, tuple[float, float]]] = {
    "dasgd 4 1 .25": {
        4: (0.3439, 1.6878),
        5: (0.864265, 1.2166425),
        8: (0.90104918, 1.69993238),
        9: (1.20310415, 1.43285287),
    },
    "dasgd 4 4 .4": {
        4: (0.3439, 1.6878),
        5: (0.40951, 1.81902),
        8: (0.83732312, 1.46513623),
        9: (0.85359080, 1.61862261),
    },
    "corrected 4 1 .25": {
        4: (0.3439, 1.6878),
        5: (0.9134725, 1.3150575),
        8: (0.93692145, 1.77167692),
        9: (1.25626261, 1.58147593),
    },
    "corrected 4 4 0": {
        4: (0.3439, 1.6878),
        5: (0.40951, 1.81902),
        8: (1.24148279, 1.46711558),
        9: (1.21733451, 1.62040402),
    },
    "local 4": {
        4: (1.01585, 1.01585),
        5: (1.014265, 1.214265),
        8: (1.35429918, 1.35429918),
        9: (1.31886927, 1.51886927),
    },
}


def toy_histories() -> list[tuple[str, History]]:
    x, g = toy_starts(), toy_gradient
    return [
        ("dasgd 4 1 .25", dasgd(x, g, 9, lr=LR, tau=4, d=1, xi=0.25)),
        ("dasgd 4 4 .4", dasgd(x, g, 9, lr=LR, tau=4, d=4, xi=0.4)),
        ("dasgd 4 4 .4", overlap_local_sgd(x, g, 9, lr=LR, tau=4, alpha=0.6, beta=0.0)),
        ("corrected 4 1 .25", corrected_dasgd(x, g, 9, lr=LR, tau=4, d=1, xi=0.25)),
        ("corrected 4 4 0", corrected_dasgd(x, g, 9, lr=LR, tau=4, d=4, xi=0.0)),
        ("corrected 4 4 0", cocod(x, g, 9, lr=LR, tau=4)),
        ("local 4", local_sgd(x, g, 9, lr=LR, tau=4)),
        ("local 4", dasgd(x, g, 9, lr=LR, tau=4, d=0, xi=0.0)),
        ("local 4", corrected_dasgd(x, g, 9, lr=LR, tau=4, d=0, xi=0.0)),
    ]


@pytest.mark.parametrize("case", range(9))
def test_vectors(case: int) -> None:
    row, history = toy_histories()[case]
    assert [float(x) for x in history[0]] == [0.0, 1.0]
    for k, expected in VECTORS[row].items():
        for i in range(2):
            assert float(history[k][i]) == pytest.approx(expected[i], rel=0, abs=1e-8)


# ---- what a late merge does to the mean, and to the disagreement ----


@pytest.mark.parametrize(
    ("tau", "d", "xi", "effective"),
    [(4, 1, 0.25, 3.25), (4, 2, 0.25, 2.5), (4, 4, 0.25, 1.0), (8, 2, 0.5, 7.0)],
)
def test_effective_steps_per_round(tau: int, d: int, xi: float, effective: float) -> None:
    """A round of tau steps moves the mean by tau - d + xi d of them: derived, not in the paper."""
    assert tau - d + xi * d == effective
    starts = [vector(0.0) for _ in range(3)]
    steps = 5 * tau + d
    lossy = dasgd(starts, constant(-1.0), steps, lr=1.0, tau=tau, d=d, xi=xi)
    whole = corrected_dasgd(starts, constant(-1.0), steps, lr=1.0, tau=tau, d=d, xi=xi)
    for k in range(tau + d, steps - tau + 1, tau):
        for i in range(3):
            assert float(lossy[k + tau][i] - lossy[k][i]) == pytest.approx(effective, abs=1e-12)
            assert float(whole[k + tau][i] - whole[k][i]) == pytest.approx(tau, abs=1e-12)


@pytest.mark.parametrize("d", [0, 1, 3, 4])
@pytest.mark.parametrize("corrected", [False, True])
def test_disagreement_shrinks_by_xi_per_merge(corrected: bool, d: int) -> None:
    run = corrected_dasgd if corrected else dasgd
    xi, tau = 0.4, 4
    starts = [vector(1.0, 2.0), vector(-3.0, 0.5), vector(0.0, 7.0)]
    history = run(starts, constant(0.0), 5 * tau, lr=LR, tau=tau, d=d, xi=xi)
    for k in range(5 * tau + 1):
        # merges are at r tau + d, r >= 1
        merges = max(0, (k - d) // tau)
        for i in range(3):
            expected = mean(starts) + xi**merges * (starts[i] - mean(starts))
            assert torch.allclose(history[k][i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("tau", "d", "xi"), [(4, 0, 0.3), (4, 1, 0.25), (5, 3, 0.6), (4, 4, 0.4)])
def test_contraction_per_round_on_a_quadratic(tau: int, d: int, xi: float) -> None:
    slope = 0.7
    c = LR * slope
    starts = [vector(1.0), vector(4.0), vector(-2.5)]
    steps = 6 * tau + d
    lossy = dasgd(starts, linear(slope), steps, lr=LR, tau=tau, d=d, xi=xi)
    whole = corrected_dasgd(starts, linear(slope), steps, lr=LR, tau=tau, d=d, xi=xi)
    mean_rate = (1 - c) ** (tau - d) * (1 - xi + xi * (1 - c) ** d)
    spread_rate = xi * (1 - c) ** tau
    # the corrected merge: the mean keeps every step; the disagreement at the snapshot is taken out
    whole_spread = (1 - c) ** (tau - d) * ((1 - c) ** d - (1 - xi))
    for k in range(tau + d, steps - tau + 1, tau):
        now, then = mean(lossy[k]), mean(lossy[k + tau])
        assert torch.allclose(then, mean_rate * now, rtol=0, atol=1e-12)
        whole_now, whole_then = mean(whole[k]), mean(whole[k + tau])
        assert torch.allclose(whole_then, (1 - c) ** tau * whole_now, rtol=0, atol=1e-12)
        for i in range(3):
            assert torch.allclose(
                lossy[k + tau][i] - then, spread_rate * (lossy[k][i] - now), rtol=0, atol=1e-12
            )
            assert torch.allclose(
                whole[k + tau][i] - whole_then,
                whole_spread * (whole[k][i] - whole_now),
                rtol=0,
                atol=1e-12,
            )


# ---- DaSGD's equation in one line, and the identities above ----


@pytest.mark.parametrize("d", [1, 2, 4])
def test_dasgd_is_its_equation_in_one_line(d: int) -> None:
    tau, xi = 4, 0.3
    history = dasgd(rich_starts(3, equal=False), rich_gradient, STEPS, lr=LR, tau=tau, d=d, xi=xi)
    for k in range(1, STEPS + 1):
        for i in range(3):
            last = history[k - 1][i]
            expected = last - LR * rich_gradient(i, k, last)
            if k > d and k - d >= tau and (k - d) % tau == 0:
                expected = xi * expected + (1 - xi) * mean(history[k - d])
            assert torch.allclose(history[k][i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_sgd_is_dasgd_that_overwrites_at_once(momentum: float) -> None:
    x = rich_starts(3, equal=False)
    left = local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4, momentum=momentum)
    right = dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=0, xi=0.0, momentum=momentum)
    assert_same(left, right)


def test_momentum_is_that_of_torch() -> None:
    start = vector(0.3, -0.8, 1.1)
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=0.9)
    expected = [[start.clone()]]
    for k in range(1, 9):
        weight.grad = rich_gradient(0, k, weight.detach())
        optimizer.step()
        expected.append([weight.detach().clone()])
    assert_same(local_sgd([start], rich_gradient, 8, lr=LR, tau=4, momentum=0.9), expected)
    assert_same(dasgd([start], rich_gradient, 8, lr=LR, tau=4, d=0, xi=0.5, momentum=0.9), expected)


def test_cooperative_sgd_is_dasgd_without_delay() -> None:
    # Wang, Joshi, arXiv 1808.07576: X_{k+1} = (X_k - eta G_k) W_k, columns are workers,
    # W = xi I + (1 - xi) J
    starts, m, tau, xi = rich_starts(3, equal=False), 3, 4, 0.3
    eye = torch.eye(m, dtype=torch.float64)
    mixing = xi * eye + (1 - xi) * torch.full((m, m), 1 / m, dtype=torch.float64)
    matrix = torch.stack(starts, dim=1)
    expected = [list(matrix.clone().unbind(dim=1))]
    for k in range(1, STEPS + 1):
        grads = torch.stack([rich_gradient(i, k, matrix[:, i]) for i in range(m)], dim=1)
        matrix = (matrix - LR * grads) @ (mixing if k % tau == 0 else eye)
        expected.append(list(matrix.clone().unbind(dim=1)))
    assert_same(dasgd(starts, rich_gradient, STEPS, lr=LR, tau=tau, d=0, xi=xi), expected)


def test_overlap_local_sgd_is_dasgd_a_round_late() -> None:
    x = rich_starts(3, equal=False)
    left = overlap_local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4, alpha=0.6, beta=0.0)
    assert_same(left, dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=4, xi=0.4))
    assert_differ(
        left, overlap_local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4, alpha=0.6, beta=0.7)
    )


def test_cocod_is_the_corrected_merge_a_round_late() -> None:
    x = rich_starts(3, equal=False)
    left = cocod(x, rich_gradient, STEPS, lr=LR, tau=4)
    assert_same(left, corrected_dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=4, xi=0.0))


@pytest.mark.parametrize("delay", [0, 1, 3, 4])
@pytest.mark.parametrize("nesterov", [False, True])
def test_streaming_with_one_fragment_and_plain_outer_sgd_is_dasgd(
    delay: int, nesterov: bool
) -> None:
    x = rich_starts(3, equal=True)
    left = streaming_diloco(
        x,
        rich_gradient,
        STEPS,
        lr=LR,
        tau=4,
        delay=delay,
        alpha=0.3,
        outer_lr=1.0,
        outer_momentum=0.0,
        nesterov=nesterov,
        fragments=[[0, 1, 2, 3, 4]],
    )
    assert_same(left, dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=delay, xi=0.3))


@pytest.mark.parametrize("nesterov", [False, True])
def test_streaming_without_delay_and_mixing_is_diloco(nesterov: bool) -> None:
    x = rich_starts(3, equal=True)
    left = streaming_diloco(
        x,
        rich_gradient,
        STEPS,
        lr=LR,
        tau=4,
        delay=0,
        alpha=0.0,
        outer_lr=0.7,
        outer_momentum=0.9,
        nesterov=nesterov,
        fragments=[[0, 1, 2, 3, 4]],
    )
    right = diloco(
        x,
        rich_gradient,
        STEPS,
        lr=LR,
        tau=4,
        outer_lr=0.7,
        outer_momentum=0.9,
        nesterov=nesterov,
    )
    assert_same(left, right)


def test_streaming_fragments_are_staggered_and_independent() -> None:
    # with a gradient that acts coordinate by coordinate, fragment p of 2 with tau = 4 is dasgd on
    # its own coordinates, counted from its own offset: 2 for the first, 4 = 0 for the second
    fragments = [[0, 3], [4, 1, 2]]
    x = rich_starts(3, equal=True)
    both = streaming_diloco(
        x,
        rich_gradient,
        STEPS,
        lr=LR,
        tau=4,
        delay=1,
        alpha=0.3,
        outer_lr=1.0,
        outer_momentum=0.0,
        nesterov=False,
        fragments=fragments,
    )
    second = dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=1, xi=0.3)
    assert_same(
        [[x_i[fragments[1]] for x_i in row] for row in both],
        [[x_i[fragments[1]] for x_i in row] for row in second],
    )
    # merges of the first fragment: steps 3, 7, 11, ..., from the snapshots of 2, 6, 10, ...
    for k in range(1, STEPS + 1):
        for i in range(3):
            last = both[k - 1][i]
            expected = last - LR * rich_gradient(i, k, last)
            if k % 4 == 3:
                expected = 0.3 * expected + 0.7 * mean(both[k - 1])
            assert torch.allclose(
                both[k][i][fragments[0]], expected[fragments[0]], rtol=0, atol=1e-12
            )


def test_diloco_with_plain_outer_sgd_is_local_sgd() -> None:
    x = rich_starts(3, equal=True)
    right = local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4)
    for nesterov in (False, True):
        left = diloco(
            x,
            rich_gradient,
            STEPS,
            lr=LR,
            tau=4,
            outer_lr=1.0,
            outer_momentum=0.0,
            nesterov=nesterov,
        )
        assert_same(left, right)


@pytest.mark.parametrize("nesterov", [False, True])
def test_outer_step_is_that_of_torch(nesterov: bool) -> None:
    history = diloco(
        rich_starts(3, equal=True),
        rich_gradient,
        STEPS,
        lr=LR,
        tau=4,
        outer_lr=0.7,
        outer_momentum=0.9,
        nesterov=nesterov,
    )
    theta = history[0][0].clone().requires_grad_()
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=nesterov)
    for k in range(4, STEPS + 1, 4):
        # the replicas just before the merge of step k
        local = [x - LR * rich_gradient(i, k, x) for i, x in enumerate(history[k - 1])]
        theta.grad = theta.detach() - mean(local)
        optimizer.step()
        for i in range(3):
            assert torch.allclose(history[k][i], theta.detach(), rtol=0, atol=1e-12)


# ---- eager, CO2, post-local ----


@pytest.mark.parametrize("nesterov", [False, True])
def test_eager_with_one_replica_is_diloco(nesterov: bool) -> None:
    x = rich_starts(1, equal=True)
    left = eager_diloco(
        x, rich_gradient, STEPS, lr=LR, tau=4, outer_lr=0.7, outer_momentum=0.9, nesterov=nesterov
    )
    right = diloco(
        x, rich_gradient, STEPS, lr=LR, tau=4, outer_lr=0.7, outer_momentum=0.9, nesterov=nesterov
    )
    assert_same(left, right)


def test_eager_first_rounds_by_hand() -> None:
    # constant gradients -1 and -3, lr 1, tau 2, from 0: the deltas are -2 and -6 in every round
    def gradient(replica: int, k: int, x: Tensor) -> Tensor:
        return torch.full_like(x, (-1.0, -3.0)[replica])

    history = eager_diloco(
        [vector(0.0), vector(0.0)],
        gradient,
        4,
        lr=1.0,
        tau=2,
        outer_lr=1.0,
        outer_momentum=0.0,
        nesterov=False,
    )
    # round 1: own delta / 2; round 2: own delta / 2 + (mean - own / 2) = the mean, -4
    assert [float(x) for x in history[1]] == [1.0, 3.0]
    assert [float(x) for x in history[2]] == [1.0, 3.0]
    assert [float(x) for x in history[4]] == [5.0, 7.0]


def test_co2_first_rounds_by_hand() -> None:
    # constant gradients -1 and -3, lr 1, tau 2, from 0; outer lr 0.5, momentum 0.5, penalty 2
    def gradient(replica: int, k: int, x: Tensor) -> Tensor:
        return torch.full_like(x, (-1.0, -3.0)[replica])

    def run(clip: float | None) -> History:
        return co2(
            [vector(0.0), vector(0.0)],
            gradient,
            6,
            lr=1.0,
            tau=2,
            outer_lr=0.5,
            outer_momentum=0.5,
            penalty=2.0,
            clip=clip,
        )

    free = run(None)
    # k = 2: sent 4, nothing used. k = 4: sent 8; m = (0 - 4)/2 = -2; x = 0 + 1.
    # k = 6: m = -1 + (1 - 8)/2 = -4.5; x = 1 + 2.25.
    assert [float(x) for x in free[2]] == [2.0, 6.0]
    assert [float(x) for x in free[4]] == [1.0, 1.0]
    assert [float(x) for x in free[5]] == [2.0, 4.0]
    assert [float(x) for x in free[6]] == [3.25, 3.25]
    # clipped to 1.5: m = -1.5, x = 0.75; then m = -0.75 + (0.75 - 8)/2 -> -1.5, x = 1.5
    clipped = run(1.5)
    assert [float(x) for x in clipped[4]] == [0.75, 0.75]
    assert [float(x) for x in clipped[6]] == [1.5, 1.5]


def test_post_local_sgd_joins_its_two_parts() -> None:
    x = rich_starts(3, equal=True)
    synchronous = all_reduce(x, rich_gradient, STEPS, lr=LR)
    assert_same(synchronous, local_sgd(x, rich_gradient, STEPS, lr=LR, tau=1))
    assert_same(post_local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4, switch=STEPS), synchronous)
    local = local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4)
    assert_same(post_local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4, switch=0), local)

    switch = 6
    joined = post_local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4, switch=switch)
    assert_same(joined[: switch + 1], synchronous[: switch + 1])

    def later(replica: int, k: int, x: Tensor) -> Tensor:
        return rich_gradient(replica, k + switch, x)

    assert_same(
        joined[switch:], local_sgd(synchronous[switch], later, STEPS - switch, lr=LR, tau=4)
    )


def test_one_replica_without_outer_step_is_plain_sgd() -> None:
    x = rich_starts(1, equal=True)
    plain = all_reduce(x, rich_gradient, STEPS, lr=LR)
    assert_same(local_sgd(x, rich_gradient, STEPS, lr=LR, tau=4), plain)
    assert_same(cocod(x, rich_gradient, STEPS, lr=LR, tau=4), plain)
    assert_same(corrected_dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=2, xi=0.3), plain)
    # the authors' merge throws progress away even with one replica
    assert_differ(dasgd(x, rich_gradient, STEPS, lr=LR, tau=4, d=2, xi=0.3), plain)


def test_refusals() -> None:
    x, g = rich_starts(2, equal=False), rich_gradient
    with pytest.raises(ValueError, match="d <= tau"):
        dasgd(x, g, 1, lr=LR, tau=4, d=5, xi=0.25)
    with pytest.raises(ValueError, match="d <= tau"):
        corrected_dasgd(x, g, 1, lr=LR, tau=4, d=5, xi=0.25)
    with pytest.raises(ValueError, match="equal starts"):
        all_reduce(x, g, 1, lr=LR)
