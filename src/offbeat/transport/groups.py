"""The processes of a run as torch.distributed knows them: joining, groups, stores, leaving."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from offbeat.transport.gloo import FOREVER


def are_joined() -> bool:
    """Whether this process has joined others."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def join(timeout_s: float) -> None:
    """Joins the others, unless that has been done already.

    After a restart by torchrun without what the last attempt left behind: its store outlives an
    attempt, and gloo would connect to addresses of processes that are gone.
    """
    if are_joined():
        return
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


def store_of(group: dist.ProcessGroup) -> Store:
    """Where the processes of a group find each other: of this group alone."""
    return PrefixStore(f"offbeat-links/{group.group_name}", default_store())


def new(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group in which no wait is longer than this, that for its other processes included.

    Every process makes every group, in the same order: that is how groups find each other.
    """
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    return group


def new_patient(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """A group that is connected within this time; later the waits in it may be of any length."""
    group = new(ranks, timeout_s)
    if dist.get_rank() in ranks:
        dist.distributed_c10d._set_pg_timeout(FOREVER, group)
    return group


def broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Gives a tensor of the group's member ``source`` to all members."""
    dist.broadcast(tensor, group=group, group_src=source)
