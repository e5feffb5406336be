"""What a message looks like on the wire: a small typed header, then raw tensor bytes.

The header is JSON: the key, the shape of the nest, and for every tensor its type, sizes, strides
and where its bytes are: inside the header (small ones), in memory that both processes see, or
behind the header. Nothing is unpickled, and any message may differ from the one before it. Strides
travel, so that a layout such as channels-last arrives as it left.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from offbeat.errors import StageError, WorkerLost
from offbeat.nest import is_dense
from offbeat.transport.base import Key, What
from offbeat.transport.shared import Arena, Window

HEADER_BYTES = 4096
_INLINE_BYTES = 64
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Parcel:
    """A message ready to be sent: header bytes and the tensors that follow."""

    header: bytes
    tensors: list[Tensor]


def pack(key: Key, message: Any, arena: Arena | None = None) -> Parcel:
    """Describes a message. Tensors are copied into the arena, if there is one for this receiver."""
    metas: list[dict[str, Any]] = []
    bodies: list[Tensor] = []

    def describe(part: Any) -> Any:
        if part is None or type(part) in _PLAIN:
            return {"v": part}
        if isinstance(part, Tensor):
            meta, body = _place(part.detach(), part.requires_grad, arena)
            metas.append(meta)
            if body is not None:
                bodies.append(body)
            return {"t": len(metas) - 1}
        if type(part) in (tuple, list):
            return {"p" if type(part) is tuple else "l": [describe(item) for item in part]}
        if type(part) is dict and all(type(name) in (str, int) for name in part):
            return {"d": [[name, describe(item)] for name, item in part.items()]}
        raise StageError(
            f"a {type(part).__name__} cannot travel between processes: pass tensors, None, numbers"
            " and strings in tuples, lists and dicts with string or integer keys."
        )

    nest = describe(message)
    header = json.dumps({"key": list(key), "nest": nest, "tensors": metas}).encode()
    return Parcel(header, bodies)


def _place(tensor: Tensor, grad: bool, arena: Arena | None) -> tuple[dict[str, Any], Tensor | None]:
    """The words to rebuild a tensor, and its bytes where they follow the header."""
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    count = tensor.numel() * tensor.itemsize
    meta: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "size": list(tensor.size()),
        "stride": list(tensor.stride()),
        "grad": grad,
    }
    shared = arena.room_for(count) if arena else None
    if shared is not None:
        meta["file"], room = shared
        room.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()).copy_(tensor)
        return meta, None
    flat = tensor.cpu().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if count <= _INLINE_BYTES:
        meta["inline"] = bytes(flat.tolist()).hex()
        return meta, None
    return meta, flat


class Arrival:
    """A message of which the header is here: buffers to receive into, then the message itself."""

    def __init__(self, header: bytes, window: Window | None = None) -> None:
        self._flat: list[Tensor] = []
        self.buffers: list[Tensor] = []
        """Fresh for every message, so nothing that refers to an older one is overwritten."""
        with _refusing_other_words():
            words = json.loads(header)
            self.key = _key(*words["key"])
            self._nest = words["nest"]
            self._metas = words["tensors"]
            for meta in self._metas:
                self._flat.append(self._place_of(meta, window))

    def _place_of(self, meta: dict[str, Any], window: Window | None) -> Tensor:
        count = torch.Size(meta["size"]).numel() * _dtype(meta["dtype"]).itemsize
        if "inline" in meta:
            return torch.tensor(list(bytes.fromhex(meta["inline"])), dtype=torch.uint8)
        if "file" in meta:
            if window is None or type(meta["file"]) is not int:
                raise ValueError(f"file {meta['file']!r} is not in shared memory")
            return window.look(meta["file"], count)
        buffer = torch.empty(count, dtype=torch.uint8)
        self.buffers.append(buffer)
        return buffer

    def message(self, device: torch.device) -> Any:
        """The nest, once the buffers are full."""
        tensors = []
        with _refusing_other_words():
            for flat, meta in zip(self._flat, self._metas, strict=True):
                tensor = flat.view(_dtype(meta["dtype"])).as_strided(meta["size"], meta["stride"])
                tensors.append(tensor.to(device).requires_grad_(meta["grad"]))
            return _rebuild(self._nest, tensors)


def _rebuild(nest: dict[str, Any], tensors: list[Tensor]) -> Any:
    ((kind, value),) = nest.items()
    if kind == "v":
        return value
    if kind == "t":
        return tensors[value]
    if kind == "d":
        return {name: _rebuild(part, tensors) for name, part in value}
    parts = [_rebuild(part, tensors) for part in value]
    return tuple(parts) if kind == "p" else parts


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensor")
    return found


def _key(what: What, *numbers: int) -> Key:
    if what not in get_args(What) or any(type(number) is not int for number in numbers):
        raise ValueError(f"{what!r} {numbers} is no key")
    return Key(what, *numbers)


@contextmanager
def _refusing_other_words() -> Iterator[None]:
    """Whatever is wrong with a message becomes one error, which ends every wait."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise WorkerLost(
            f"a message that is not this library's arrived ({error}). Something else writes to a"
            " connection of this run, or the processes run different versions of offbeat."
        ) from error
