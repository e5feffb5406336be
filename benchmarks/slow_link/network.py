"""Hosts played by network namespaces, joined by a switch over links of limited rate.

Every host has its own interfaces, addresses and ports. Its only way out is a cable to the switch, a
bridge in a namespace of its own, so that nothing of this shows outside. Token buckets (``tbf``) at
both ends of a cable limit what the host sends and what it receives.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

PORT = 29500
"""Any port will do: nobody else lives in these namespaces."""
_BURST_BYTES = 80_000
"""One segment of the largest size; a larger bucket would let a part of an average through free."""
_QUEUE_BYTES = 16_000_000
"""More than is ever under way: nothing is dropped, senders are slowed down."""


class Skipped(Exception):
    """This machine cannot play hosts; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a process needs to know about where it lives."""

    rank: int
    namespace: str
    address: str
    switch: str
    """The switch's namespace."""

    @property
    def port(self) -> str:
        """The switch's end of this host's cable."""
        return f"port{self.rank}"

    def limit(self, mbit: float | None) -> None:
        """Sets the rate of both directions of this host's cable; None for no limit."""
        for namespace, device in ((self.namespace, "cable"), (self.switch, self.port)):
            where = ["tc", "-n", namespace, "qdisc"]
            if mbit is None:
                _run([*where, "delete", "dev", device, "root"], check=False)
            else:
                _run([*where, "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit",
                      "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)])  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Builds the network; takes it down again whatever happens, Ctrl-C included."""
    _refuse_without_tools()
    prefix = f"slow-link-{os.getpid()}"
    switch = f"{prefix}-switch"
    found = [
        Host(
            rank=rank,
            namespace=f"{prefix}-{rank}",
            address=f"10.78.{os.getpid() % 256}.{rank + 1}",
            switch=switch,
        )
        for rank in range(count)
    ]
    names = [switch, *(host.namespace for host in found)]
    # A polite end comes as an exception, so that the clearing up below happens.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit("ended by a signal"))
    try:
        _build(switch, found)
        yield found
    finally:
        before = [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]
        for name in names:
            _remove(name)
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def _refuse_without_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise Skipped("network namespaces need Linux")
    if os.geteuid() != 0:
        raise Skipped("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Skipped(f"`{tool}` is missing; it is part of iproute2")


def _build(switch: str, found: Sequence[Host]) -> None:
    try:
        _run(["ip", "netns", "add", switch])
        _run(["ip", "-n", switch, "link", "add", "bridge0", "type", "bridge"])
        _run(["ip", "-n", switch, "link", "set", "bridge0", "up"])
        for host in found:
            inside = ["ip", "-n", host.namespace]
            _run(["ip", "netns", "add", host.namespace])
            _run([*inside, "link", "add", "cable", "type", "veth",
                  "peer", "name", host.port, "netns", switch])  # fmt: skip
            _run(["ip", "-n", switch, "link", "set", host.port, "master", "bridge0", "up"])
            _run([*inside, "address", "add", f"{host.address}/24", "dev", "cable"])
            _run([*inside, "link", "set", "cable", "up"])
            _run([*inside, "link", "set", "lo", "up"])
            host.limit(1000)  # says early whether the kernel has tbf
    except subprocess.CalledProcessError as error:
        words = " ".join(error.stderr.split())
        raise Skipped(f"`{' '.join(error.cmd)}` is not possible here: {words}") from None


def _remove(namespace: str) -> None:
    pids = _run(["ip", "netns", "pids", namespace], check=False).stdout.split()
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _run(["ip", "netns", "delete", namespace], check=False)


def _run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=check)
