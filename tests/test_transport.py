"""Every kind of link between processes, that of docs/add-a-transport.md too; and who gets which."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import jobs
import offbeat
from helpers import assert_same_bits
from offbeat import nest
from offbeat.errors import ConfigurationError, WorkerLost
from offbeat.methods import StaleWeights
from offbeat.transport import LINKS, choose
from offbeat.transport.base import Gathered, Key
from offbeat.transport.groups import Collectives
from offbeat.transport.link import End, Link, open_pair
from offbeat.transport.wire import pack
from test_docs import ADD_TRANSPORT, blocks

CPU = torch.device("cpu")
OF_THE_PAGE = "unix_of_the_page"
EVERY = pytest.mark.parametrize(
    "name", [*(kind.name for kind in LINKS), pytest.param("unix socket", id="of the page")]
)


@pytest.fixture
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Link]]:
    """Those of the list, and the page's, in a file that processes can import."""
    (tmp_path / f"{OF_THE_PAGE}.py").write_text(blocks(ADD_TRANSPORT, "python")[0].text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, OF_THE_PAGE, raising=False)
    own: type[Link] = importlib.import_module(OF_THE_PAGE).UnixSocket
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return {kind.name: kind for kind in (*LINKS, own)}


def opened(kind: type[Link]) -> tuple[Link, Link]:
    """A link of this process with itself: the end that sends, the end that receives."""
    store = HashStore()
    ends = [End(sends, store, kind.address(), CPU, 20.0) for sends in (True, False)]
    with ThreadPoolExecutor() as threads:
        there, here = threads.map(kind, ends)
    return there, here


def messages() -> list[Any]:
    torch.manual_seed(0)
    tensors = [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(5, 7).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(300, 700),
        torch.randn(9).bfloat16(),
        torch.rand(100) < 0.5,
        torch.randn(3, requires_grad=True),
    ]
    return [*tensors, None, {"a": (tensors[4], [1, 2.5, "x"]), "b": tensors[2]}, tensors[4][::2]]


@EVERY
def test_messages_arrive_whole_and_in_order(kinds: dict[str, type[Link]], name: str) -> None:
    there, here = opened(kinds[name])
    todo = messages()

    def send() -> None:
        for number, message in enumerate(todo):
            there.send(pack(Key("activation", 1, number), message, there.place, there.device))

    sender = threading.Thread(target=send, daemon=True)  # it may wait for its receiver
    sender.start()
    for number, message in enumerate(todo):
        arrival = here.receive()
        assert arrival.key == Key("activation", 1, number)
        found = arrival.message()
        assert type(found) is type(message)
        for ours, theirs in zip(nest.tensors(found), nest.tensors(message), strict=True):
            assert torch.equal(ours, theirs)
            assert (ours.dtype, ours.requires_grad) == (theirs.dtype, theirs.requires_grad)
            assert ours.stride() == theirs.stride() or not nest.is_dense(theirs)
    sender.join()
    for link in (there, here, there, here):
        link.close()


@EVERY
@pytest.mark.parametrize("sends", [True, False])
def test_an_end_that_never_comes_gets_words(
    kinds: dict[str, type[Link]], name: str, sends: bool
) -> None:
    end = End(sends, HashStore(), kinds[name].address(), CPU, 0.3)
    with pytest.raises(WorkerLost, match=rf"no connection with stage 1 by {name} within 0.3 s"):
        open_pair(kinds[name], end, "stage 1")


@pytest.mark.timeout(120)
def test_two_processes_train_over_it_with_the_bits_of_one(kinds: dict[str, type[Link]]) -> None:
    alone = jobs.train("cnn", StaleWeights(), 2)
    for found in offbeat.launch(jobs.train_over, 2, [*kinds.values()], timeout_s=100):
        for ours in found:
            assert_same_bits(ours["state"], alone["state"])
            assert (ours["losses"], ours["lags"]) == (alone["losses"], alone["lags"])


@EVERY
def test_a_process_that_dies_is_named_by_the_other(
    kinds: dict[str, type[Link]], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerLost, match="rank 1 ended with signal SIGKILL"):
        offbeat.launch(jobs.lose_the_other, 2, kinds[name], timeout_s=60)
    assert "the connection to rank 1 broke" in capfd.readouterr().err


# ------------------------------------------------------------------ who gets which


def test_an_edge_gets_the_first_kind_that_both_ends_can_use() -> None:
    near, far = LINKS[0].name, LINKS[-1].name
    both, one = [near, far], [far]
    seen = [[both, both, one], [both, both, one], [both, one, one]]
    assert choose(seen, 0, 1) is LINKS[0]
    assert choose(seen, 1, 2) is LINKS[-1]
    assert choose(seen, 0, 2) is LINKS[-1]  # one of the two cannot use the first kind
    words = rf"no link between processes 0 and 1 of .* process 0 can use {far} and process 1 none"
    with pytest.raises(ConfigurationError, match=words):
        choose([[[], one], [[], []]], 0, 1)


def test_gloo_is_named_where_it_has_to_be() -> None:
    """Its own file, the list, the kind that is built on it, and the groups of torch.distributed."""
    package = Path(offbeat.__file__).parent
    naming = {path for path in package.rglob("*.py") if "gloo" in path.read_text().lower()}
    own = {f"transport/{name}.py" for name in ("__init__", "gloo", "shared", "groups")}
    assert {path.relative_to(package).as_posix() for path in naming} == own


@pytest.mark.parametrize("summed", [False, True])
def test_a_stage_without_weights_gathers_nothing_and_waits_for_nobody(*, summed: bool) -> None:
    """One that only borrows its weights, or an nn.Tanh: its replicas have no part to wait for."""
    arrived: dict[Key, Gathered] = {}

    def raise_it(error: Exception) -> None:
        raise error

    class Three:
        size = staticmethod(lambda: 3)

    of_stage: Any = {1: Three()}
    collectives = Collectives(of_stage, CPU, arrived.__setitem__, raise_it)
    collectives.gather(Key("export", 1, 0), [], summed=summed)
    (gathered,) = arrived.values()
    assert gathered.parts == [[]] * (1 if summed else 3)
    assert gathered.replicas == 3
