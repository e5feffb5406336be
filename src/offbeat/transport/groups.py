"""The processes of a run as torch.distributed knows them: joining, groups, the launcher's store."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from offbeat.transport.gloo import FOREVER


def join(timeout_s: float) -> None:
    """Joins the others; after a restart by torchrun without what the last attempt left behind.

    Its store outlives an attempt, and gloo would connect to addresses of processes that are gone.
    """
    timeout = timedelta(seconds=timeout_s)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt == 0:
        dist.init_process_group("gloo", timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    join_at(PrefixStore(f"attempt-{attempt}", store), rank, size, timeout)


def join_at(store: Store, rank: int, size: int, timeout: timedelta | None = None) -> None:
    """Joins those who have the same store."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


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


def new_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group in which no wait is longer than this, that for its other processes included.

    Every process makes every group, in the same order: that is how groups find each other.
    """
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    return group


def patient_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group that is connected within this time; later the waits in it may be of any length."""
    group = new_group(ranks, timeout_s)
    if dist.get_rank() in ranks:
        dist.distributed_c10d._set_pg_timeout(FOREVER, group)
    return group
