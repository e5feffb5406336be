"""What a message looks like on the wire: a small typed header, then raw tensor bytes.

The header is JSON: the key, the shape of the nest, and for every tensor its type, sizes and
strides. Nothing is unpickled, and any message may differ from the one before it. Strides travel, so
that a layout such as channels-last arrives as it left. Small tensors ride inside the header.
"""

import json
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.errors import StageError
from offbeat.nest import is_dense
from offbeat.transport import Key

HEADER_BYTES = 4096
_INLINE_BYTES = 64
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class Parcel:
    """A message ready to be sent: header bytes and the tensors that follow."""

    header: bytes
    tensors: list[Tensor]


def pack(key: Key, message: Any) -> Parcel:
    """Describes a message; the tensors are not copied unless their memory has holes."""
    metas: list[list[Any]] = []
    bodies: list[Tensor] = []

    def describe(part: Any) -> Any:
        if part is None or type(part) in _PLAIN:
            return {"v": part}
        if isinstance(part, Tensor):
            flat, meta = _flatten(part)
            metas.append(meta)
            if meta[-1] is None and flat.numel():
                bodies.append(flat)
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


def _flatten(tensor: Tensor) -> tuple[Tensor, list[Any]]:
    """The tensor's memory as one row of bytes, and the words to rebuild it."""
    grad = tensor.requires_grad
    tensor = tensor.detach().cpu()
    if not is_dense(tensor):
        tensor = tensor.contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    small = flat.numel() <= _INLINE_BYTES
    inline = bytes(flat.tolist()).hex() if small else None
    name = str(tensor.dtype).removeprefix("torch.")
    return flat, [name, list(tensor.size()), list(tensor.stride()), grad, inline]


class Arrival:
    """A message of which the header is here: buffers to receive into, then the message itself."""

    def __init__(self, header: bytes) -> None:
        words = json.loads(header)
        self.key = Key(*words["key"])
        self._nest = words["nest"]
        self._metas = words["tensors"]
        self._flat: list[Tensor] = []
        self.buffers: list[Tensor] = []
        """Fresh for every message, so nothing that refers to an older one is overwritten."""
        for dtype, size, _, _, inline in self._metas:
            count = torch.Size(size).numel() * _dtype(dtype).itemsize
            if inline is None and count:
                flat = torch.empty(count, dtype=torch.uint8)
                self.buffers.append(flat)
            else:
                flat = torch.tensor(list(bytes.fromhex(inline or "")), dtype=torch.uint8)
            self._flat.append(flat)

    def message(self, device: torch.device) -> Any:
        """The nest, once the buffers are full."""
        tensors = []
        for flat, (dtype, size, stride, grad, _) in zip(self._flat, self._metas, strict=True):
            tensor = flat.view(_dtype(dtype)).as_strided(size, stride).to(device)
            tensors.append(tensor.requires_grad_(grad))
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
    return cast(torch.dtype, getattr(torch, name))
