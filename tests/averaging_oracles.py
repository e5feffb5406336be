"""Literal transcriptions of the averaging methods, one small function per method.

Each is written from the equation and the paper in its docstring, without the library, so that the
two can be compared. Where a paper leaves something open, its authors' program decided, and the
docstring says so. There are m replicas with weights x^i; eta is ``lr``, g^i_k the gradient of
replica i in its step k = 1, 2, ..., and r = 1, 2, ... counts rounds of tau steps. Every local step
is x^i <- x^i - eta g^i_k(x^i), with a local momentum v^i <- mu v^i + g^i_k in place of g^i_k where
there is one.

Every function returns ``history`` where ``history[k][i]`` is the weight vector of replica ``i``
after step ``k``, including any merge of that step, and ``history[0]`` holds the starts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# gradient(replica, k, x): the gradient for local step k = 1, 2, ... at the weights x
Gradient = Callable[[int, int, Tensor], Tensor]
History = list[list[Tensor]]


def copies(vectors: list[Tensor]) -> list[Tensor]:
    """Independent float64 copies."""
    return [vector.detach().to(torch.float64).clone() for vector in vectors]


def mean(vectors: list[Tensor]) -> Tensor:
    """(1/m) sum_j x^j."""
    total = torch.zeros_like(vectors[0])
    for vector in vectors:
        total = total + vector
    return total / len(vectors)


def check_common(starts: list[Tensor]) -> None:
    """Refuse unequal starts, for the methods that are defined from one common model only."""
    for start in starts:
        if not torch.equal(start, starts[0]):
            raise ValueError("this method is defined from equal starts only")


def check_delay(tau: int, d: int) -> None:
    """An average must be merged before the next one starts; in DaSGD's program it never is else."""
    if not 0 <= d <= tau:
        raise ValueError(f"need 0 <= d <= tau, not d = {d}, tau = {tau}")


def all_reduce(starts: list[Tensor], gradient: Gradient, steps: int, *, lr: float) -> History:
    """Synchronous data parallel: x <- x - eta (1/m) sum_j g^j_k(x), from equal starts."""
    check_common(starts)
    x = copies(starts)
    history = [copies(x)]
    for k in range(1, steps + 1):
        g = mean([gradient(i, k, x[i]) for i in range(len(x))])
        for i in range(len(x)):
            x[i] = x[i] - lr * g
        history.append(copies(x))
    return history


def local_sgd(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    offset: int = 0,
    momentum: float = 0.0,
) -> History:
    """Local SGD, Stich 2019 (arXiv 1805.09767): at k = r tau, x^i <- (1/m) sum_j x^j.

    ``offset``: at k = r tau + offset, of which the first may be r = 0.
    """
    x = copies(starts)
    v = [torch.zeros_like(x_i) for x_i in x]  # local momentum, never touched by the averaging
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            v[i] = momentum * v[i] + gradient(i, k, x[i])
            x[i] = x[i] - lr * v[i]
        if (k - offset) % tau == 0:
            z = mean(x)
            for i in range(len(x)):
                x[i] = z
        history.append(copies(x))
    return history


def dasgd(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    d: int,
    xi: float,
    momentum: float = 0.0,
) -> History:
    """DaSGD, Zhou et al. 2020 (arXiv 2006.00441):

        x^i_k = xi (x^i_{k-1} - eta g^i_k) + (1 - xi) z_r   at k = r tau + d
        z_r   = (1/m) sum_j x^j_{r tau}

    As in the authors' program xi multiplies the replica's own weights, and the merge comes after
    the local step. d = 0 merges at once; d = tau merges first and then takes the next snapshot, of
    the merged models.
    """
    check_delay(tau, d)
    x = copies(starts)
    v = [torch.zeros_like(x_i) for x_i in x]  # local momentum, never touched by the merges
    handle: Tensor | None = None  # the average on its way
    start = 0  # the step at which it was started
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            v[i] = momentum * v[i] + gradient(i, k, x[i])
            x[i] = x[i] - lr * v[i]
        if handle is not None and k == start + d:
            z = handle
            for i in range(len(x)):
                x[i] = xi * x[i] + (1 - xi) * z
            handle = None
        if k % tau == 0:
            buf = mean(x)
            if d == 0:
                z = buf
                for i in range(len(x)):
                    x[i] = xi * x[i] + (1 - xi) * z
            else:
                handle = buf
                start = k
        history.append(copies(x))
    return history


def corrected_dasgd(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    d: int,
    xi: float,
) -> History:
    """DaSGD's loop with a merge that keeps what was learnt during the delay:

        x^i <- x^i + (1 - xi)(z_r - x^i_{r tau})   at k = r tau + d

    CoCoD-SGD (arXiv 1906.12043) is xi = 0 and d = tau. The mean over replicas then takes every
    step: their snapshots' mean is z_r itself.
    """
    check_delay(tau, d)
    x = copies(starts)
    handle: Tensor | None = None
    snapshot = copies(x)  # x_{r tau}^i
    start = 0
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if handle is not None and k == start + d:
            z = handle
            for i in range(len(x)):
                x[i] = x[i] + (1 - xi) * (z - snapshot[i])
            handle = None
        if k % tau == 0:
            snapshot = copies(x)
            buf = mean(x)
            if d == 0:
                z = buf
                for i in range(len(x)):
                    x[i] = x[i] + (1 - xi) * (z - snapshot[i])
            else:
                handle = buf
                start = k
        history.append(copies(x))
    return history


def overlap_local_sgd(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    alpha: float,
    beta: float,
) -> History:
    """Overlap-Local-SGD, Wang, Liang, Joshi 2020 (arXiv 2002.09539), as in the authors' program
    (github.com/JYWa/Overlap_Local_SGD) but for its first pull, toward the initial model.

    At the first boundary nothing has arrived: the replicas only start the average of their own x.
    At every later boundary, with the anchor z_r that was started at the boundary before:

        x^i <- (1 - alpha) x^i + alpha z_r
        v   <- beta v + (z_r - x^i)/eta, with the x^i just pulled (first: v = (z_r - x^i)/eta)
        z^i <- z_r - eta v, and the average of the z^i is started
    """
    x = copies(starts)
    v: list[Tensor] | None = None
    anchor: Tensor | None = None  # z_r
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            if anchor is None:
                anchor = mean(x)
            else:
                z = anchor
                for i in range(len(x)):
                    x[i] = (1 - alpha) * x[i] + alpha * z
                if v is None:
                    v = [(z - x[i]) / lr for i in range(len(x))]
                else:
                    v = [beta * v[i] + (z - x[i]) / lr for i in range(len(x))]
                anchor = mean([z - lr * v[i] for i in range(len(x))])
        history.append(copies(x))
    return history


def cocod(starts: list[Tensor], gradient: Gradient, steps: int, *, lr: float, tau: int) -> History:
    """CoCoD-SGD, Shen et al. 2019 (arXiv 1906.12043): at k = r tau, x^i <- z + (x^i - x_prev^i).

    z is the mean of the models at the boundary before, x_prev^i the own model then; after that
    the average of the new x^i is started. The first boundary has no z and only starts one.
    """
    x = copies(starts)
    z: Tensor | None = None
    x_prev = copies(x)
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            if z is not None:
                for i in range(len(x)):
                    x[i] = z + (x[i] - x_prev[i])
            z = mean(x)
            x_prev = copies(x)
        history.append(copies(x))
    return history


def diloco(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
) -> History:
    """DiLoCo, Douillard et al. 2023 (arXiv 2311.08105), with H for tau; the outer step is SGD with
    momentum mu as ``torch.optim.SGD`` writes it:

        Delta_m = theta^(t-H) - theta_m^(t);  Delta = mean_m Delta_m
        v <- mu v + Delta
        theta^(t) = theta^(t-H) - lr_o (Delta + mu v)   with Nesterov
        theta^(t) = theta^(t-H) - lr_o v                without

    and every replica restarts from theta^(t).
    """
    check_common(starts)
    x = copies(starts)
    theta = copies(starts)[0]
    v = torch.zeros_like(theta)
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            delta = mean([theta - x[i] for i in range(len(x))])
            v = outer_momentum * v + delta
            if nesterov:
                theta = theta - outer_lr * (delta + outer_momentum * v)
            else:
                theta = theta - outer_lr * v
            for i in range(len(x)):
                x[i] = theta
        history.append(copies(x))
    return history


def streaming_diloco(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    delay: int,
    alpha: float,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
    fragments: list[list[int]],
    offset: int = 0,
) -> History:
    """Streaming DiLoCo, Douillard et al. 2025 (arXiv 2501.18512): H there is ``tau`` here, and tau
    there is ``delay``.

    Fragment p (from 0) of P starts its averages at the steps k >= 1 with
    k mod tau = ((p + 1) tau // P + offset) mod tau:

        Delta_{m,p} = theta_p(global) - theta_{m,p};  start the mean Delta_p

    and ``delay`` steps later

        theta_p(global) <- OuterOpt(theta_p(global), Delta_p)
        theta_{m,p} <- alpha theta_{m,p} + (1 - alpha) theta_p(global)

    A merge and a start of one fragment on one step: merge first; with delay 0, start and then
    merge at once.
    """
    check_common(starts)
    check_delay(tau, delay)
    x = copies(starts)
    count = len(fragments)
    theta = [copies(starts)[0][index] for index in fragments]  # global copy, per fragment
    v = [torch.zeros_like(theta_p) for theta_p in theta]  # outer momentum, per fragment
    handle: list[Tensor | None] = [None] * count  # Delta_p on its way
    start = [0] * count
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        for p in range(count):
            index = fragments[p]
            starts_now = k % tau == ((p + 1) * tau // count + offset) % tau

            if delay == 0 and starts_now:
                handle[p] = mean([theta[p] - x[i][index] for i in range(len(x))])
                start[p] = k

            delta = handle[p]
            if delta is not None and k == start[p] + delay:
                v[p] = outer_momentum * v[p] + delta
                if nesterov:
                    theta[p] = theta[p] - outer_lr * (delta + outer_momentum * v[p])
                else:
                    theta[p] = theta[p] - outer_lr * v[p]
                for i in range(len(x)):
                    merged = x[i].clone()
                    merged[index] = alpha * x[i][index] + (1 - alpha) * theta[p]
                    x[i] = merged
                handle[p] = None

            if delay > 0 and starts_now:
                handle[p] = mean([theta[p] - x[i][index] for i in range(len(x))])
                start[p] = k
        history.append(copies(x))
    return history


def eager_diloco(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    nesterov: bool,
) -> History:
    """Eager DiLoCo, Kale, Douillard, Donchev 2025 (arXiv 2502.12996); H is ``tau``, M is m, and the
    outer step that of :func:`diloco`. A replica's own share is fresh, the others' a round old:

        Delta_m^t = theta_m^(t-H) - (local weights);  Delta^t = mean_m Delta_m^t
        D~_m = (1/M) Delta_m^t + ( Delta^(t-H) - (1/M) Delta_m^(t-H) )
        theta_m^(t) = OuterOpt_m(theta_m^(t-H), D~_m)

    with Delta^(0) = Delta_m^(0) = 0. theta_m and the outer momentum are per replica.
    """
    x = copies(starts)
    m = len(x)
    theta = copies(starts)
    v = [torch.zeros_like(x_i) for x_i in x]
    last_own = [torch.zeros_like(x_i) for x_i in x]  # Delta_m^(t-H)
    last_mean = torch.zeros_like(x[0])  # Delta^(t-H)
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(m):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            own = [theta[i] - x[i] for i in range(m)]
            for i in range(m):
                eager = own[i] / m + (last_mean - last_own[i] / m)
                v[i] = outer_momentum * v[i] + eager
                if nesterov:
                    theta[i] = theta[i] - outer_lr * (eager + outer_momentum * v[i])
                else:
                    theta[i] = theta[i] - outer_lr * v[i]
                x[i] = theta[i]
            last_own = own
            last_mean = mean(own)
        history.append(copies(x))
    return history


def co2(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    penalty: float,
    clip: float | None,
) -> History:
    """CO2, Sun et al. 2024 (arXiv 2401.16265), with Lambda for ``penalty`` and phi for ``clip``: at
    k = r tau send the current x, then use the average x_avg of what was sent before.

        m_t = beta m_{t-1} + (1/Lambda)(x_old - x_avg);  m_t <- clip(m_t, phi)
        x_old <- x_old - alpha m_t;  x <- x_old

    x_old is at first the start. At the first boundary nothing has arrived: x, x_old and m stay
    as they are. The clip is an elementwise clamp to [-phi, phi], and the clamped m is kept.
    """
    x = copies(starts)
    x_old = copies(starts)
    m = [torch.zeros_like(x_i) for x_i in x]
    sent: Tensor | None = None
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(len(x)):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            x_avg = sent
            sent = mean(x)
            if x_avg is not None:
                for i in range(len(x)):
                    m[i] = outer_momentum * m[i] + (1 / penalty) * (x_old[i] - x_avg)
                    if clip is not None:
                        m[i] = m[i].clamp(-clip, clip)
                    x_old[i] = x_old[i] - outer_lr * m[i]
                    x[i] = x_old[i]
        history.append(copies(x))
    return history


def post_local_sgd(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    switch: int,
    offset: int = 0,
) -> History:
    """Post-local SGD, Lin et al. 2020 (arXiv 1808.07217): H(t) = 1 until ``switch``, then tau.

    The first ``switch`` steps apply the mean of the gradients (from equal starts that is H = 1);
    after that local SGD, with boundaries at k = switch + r tau + offset, k > switch.
    """
    check_common(starts)
    x = copies(starts)
    history = [copies(x)]
    for k in range(1, steps + 1):
        if k <= switch:
            g = mean([gradient(i, k, x[i]) for i in range(len(x))])
            for i in range(len(x)):
                x[i] = x[i] - lr * g
        else:
            for i in range(len(x)):
                x[i] = x[i] - lr * gradient(i, k, x[i])
            if (k - switch - offset) % tau == 0:
                z = mean(x)
                for i in range(len(x)):
                    x[i] = z
        history.append(copies(x))
    return history


def noloco(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    outer_lr: float,
    outer_momentum: float,
    size: int,
) -> History:
    """NoLoCo, Kolehmainen et al. 2025 (arXiv 2506.10911), as in an author's program
    (github.com/jkolehm/noloco, src/noloco/sparse_optimizer_c.py, commit 006b799): at step k = r tau
    a permutation of the m workers is drawn from numpy's generator of seed k + 1; its i-th entry is
    in group i mod n, n being how many groups there are. With n_G the size of a worker's group G:

        mean   = (1/n_G) sum_{j in G} phi^j;  mean_g = (1/n_G) sum_{j in G} (x^j - phi^j)
        delta^i <- alpha delta^i + beta mean_g + beta (mean - phi^i)
        phi^i   <- phi^i + delta^i;  x^i <- phi^i

    The program wants groups of the same size. Where m is no multiple, n is rounded up.
    """
    check_common(starts)
    x, phi, m = copies(starts), copies(starts), len(starts)
    delta = [torch.zeros_like(x_i) for x_i in x]
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(m):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            groups: list[list[int]] = [[] for _ in range((m + size - 1) // size)]
            for place, worker in enumerate(np.random.default_rng(k + 1).permutation(m)):
                groups[place % len(groups)].append(int(worker))
            for group in groups:
                mean_phi = mean([phi[j] for j in group])
                mean_g = mean([x[j] - phi[j] for j in group])
                for i in group:
                    towards = mean_phi - phi[i]
                    delta[i] = outer_momentum * delta[i] + outer_lr * mean_g + outer_lr * towards
                for i in group:
                    phi[i] = phi[i] + delta[i]
                    x[i] = phi[i]
        history.append(copies(x))
    return history


def d_psgd(starts: list[Tensor], gradient: Gradient, steps: int, *, lr: float, tau: int) -> History:
    """D-PSGD, Lian et al. 2017 (arXiv 1705.09056), over a ring of m workers:

        x^i_{k+1} = sum_j W_ij x^j_k - eta g^i(x^i_k)

    with W_ij = 1/3 for i and its two neighbours, and 1/m in rings of fewer than three. With tau
    above 1 the tau local steps from the last exchange are taken as one:
    x^i_{r tau} = sum_j W_ij x^j_{(r-1) tau} + (their sum).
    """
    check_common(starts)
    x, before, m = copies(starts), copies(starts), len(starts)
    W = torch.zeros(m, m, dtype=torch.float64)
    for i in range(m):
        ring = sorted({(i - 1) % m, i, (i + 1) % m})
        W[i, ring] = 1 / len(ring)
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(m):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % tau == 0:
            mixed = W @ torch.stack(before)
            x = [mixed[i] + (x[i] - before[i]) for i in range(m)]
            before = copies(x)
        history.append(copies(x))
    return history


def hierarchical_sgd(
    starts: list[Tensor],
    gradient: Gradient,
    steps: int,
    *,
    lr: float,
    tau: int,
    rounds: int,
    size: int,
) -> History:
    """Hierarchical local SGD, Lin et al. 2020 (arXiv 1808.07217), with H = ``tau`` and H^b =
    ``rounds``: at k = r tau each block of ``size`` workers takes its mean; where r is a multiple of
    H^b, all take the mean of all.
    """
    x, m = copies(starts), len(starts)
    history = [copies(x)]
    for k in range(1, steps + 1):
        for i in range(m):
            x[i] = x[i] - lr * gradient(i, k, x[i])
        if k % (tau * rounds) == 0:
            x = [mean(x)] * m
        elif k % tau == 0:
            blocks = [x[first : first + size] for first in range(0, m, size)]
            x = [mean(block) for block in blocks for _ in block]
        history.append(copies(x))
    return history
