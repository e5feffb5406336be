"""The processes of a run as torch.distributed knows them: joining, groups, collectives, leaving."""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from offbeat.transport.base import Gathered, Key

FOREVER = timedelta(days=3650)
"""Our own watchdog decides how long a wait may be."""
_BACKEND = "gloo"
_LONGEST_PAUSE_S = 0.005
_BUCKET_BYTES = 1 << 25
"""An all-reduce of more is made of several, so that one is copied while another is sent."""


def are_joined() -> bool:
    """Whether this process has joined others."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def stay_on_this_host() -> None:
    """Otherwise gloo listens on whichever address the host's name has."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def join(timeout_s: float) -> None:
    """Joins the others, unless that has been done already.

    After a restart by torchrun without what the last attempt left behind: its store outlives an
    attempt, and connections would be made to addresses of processes that are gone.
    """
    if are_joined():
        return
    timeout = timedelta(seconds=timeout_s)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0:
        dist.init_process_group(_BACKEND, timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    join_at(PrefixStore(f"attempt-{attempt}", store), rank, size, timeout)


def join_at(store: Store, rank: int, size: int, timeout: timedelta | None = None) -> None:
    """Joins those who have the same store."""
    dist.init_process_group(_BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)


def leave() -> None:
    dist.destroy_process_group()


def default_store() -> Store:
    """The store of those whom this process has joined."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def root_store() -> Store:
    """The launcher's own store, below all prefixes."""
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def store_of(group: dist.ProcessGroup) -> Store:
    """Where the processes of a group find each other: of this group alone."""
    return PrefixStore(f"offbeat-links/{group.group_name}", default_store())


def new(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group in which no wait is longer than this, that for its other processes included.

    Every process makes every group, in the same order: that is how groups find each other.
    """
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=_BACKEND)
    return group


def new_patient(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group that is connected within this time; later the waits in it may be of any length."""
    group = new(ranks, timeout_s)
    if dist.get_rank() in ranks:
        dist.distributed_c10d._set_pg_timeout(FOREVER, group)
    return group


def broadcast(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    source: int,
    failure: Callable[[], Exception | None],
) -> None:
    """Gives tensors of the group's member ``source`` to all members.

    ``failure``: what ends the wait, as soon as there is one. A connection that breaks raises a
    RuntimeError of gloo's, which does not know who was behind it.
    """
    works = [dist.broadcast(t, group=group, group_src=source, async_op=True) for t in tensors]
    pause_s = 0.0
    for work in works:
        while not work.is_completed():
            if (error := failure()) is not None:
                raise error
            time.sleep(pause_s)
            pause_s = min(pause_s + 1e-4, _LONGEST_PAUSE_S)
        work.wait()


class Collectives:
    """The parts of all rows for a stage by one collective; it breaks when one of them dies."""

    def __init__(
        self,
        of_stage: Mapping[int, dist.ProcessGroup],
        device: torch.device,
        deliver: Callable[[Key, Gathered], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``of_stage``: a group each, because only what one stage asks for comes in order."""
        self._groups, self._device = of_stage, device
        self._deliver, self._failed = deliver, failed
        self._lock = threading.Lock()
        self.threads: Sequence[threading.Thread] = ()
        self.connections: Sequence[Any] = ()

    def gather(self, key: Key, parts: Sequence[Tensor], *, summed: bool) -> None:
        sent_s = time.perf_counter()
        group = self._groups[key.to]
        if not parts:  # of a stage without weights of its own: no work would ever be done
            nothing: list[list[Tensor]] = [[] for _ in range(1 if summed else group.size())]
            self._deliver(key, Gathered(nothing, sent_s, sent_s, group.size()))
            return
        rows = [part.detach().cpu().contiguous() for part in parts]
        results, works = _sum(rows, group) if summed else _collect(rows, group)
        left = len(works)

        def one_done(future: Any) -> None:
            nonlocal left
            try:
                future.value()
            except RuntimeError as error:
                self._failed(error)
                return
            with self._lock:
                left -= 1
                if left:
                    return
            there = [result.to(self._device) for result in results]
            every = [there] if summed else [list(one) for one in zip(*there, strict=True)]
            self._deliver(key, Gathered(every, sent_s, time.perf_counter(), group.size()))

        # The callbacks hold the rows until everything is sent.
        one_done.rows = rows  # type: ignore[attr-defined]
        for work in works:
            work.get_future().add_done_callback(one_done)

    def close(self) -> None:
        """Nothing is open: what was gathered has arrived, or nobody will ask for it."""


def _sum(rows: list[Tensor], group: dist.ProcessGroup) -> tuple[list[Tensor], list[Any]]:
    results = [row.clone() for row in rows]  # in place, so never in the sender's own memory
    buckets = [
        bucket for row in results for bucket in row.split(max(1, _BUCKET_BYTES // row.itemsize))
    ]
    return results, [dist.all_reduce(b, group=group, async_op=True) for b in buckets]


def _collect(rows: list[Tensor], group: dist.ProcessGroup) -> tuple[list[Tensor], list[Any]]:
    results = [row.new_empty(group.size(), *row.shape) for row in rows]
    return results, [
        _all_gather(_bytes_of(result), _bytes_of(row), group=group, async_op=True)
        for result, row in zip(results, rows, strict=True)
    ]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# Renamed in torch 2.13; the old name warns there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
