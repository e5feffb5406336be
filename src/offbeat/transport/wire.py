"""What a message looks like on the wire: a small typed header, then raw tensor bytes.

The header is JSON: the key, the nest in words (see :mod:`offbeat.nest`), and for every tensor its
type, sizes, strides and where its bytes are: inside the header (small ones), in a place that the
link knows (such as memory that both processes see), or behind the header. Nothing is unpickled,
and any message may differ from the one before it. Strides travel, so that a layout such as
channels-last arrives as it left.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from offbeat import nest
from offbeat.errors import StageError, WorkerLost
from offbeat.transport.base import Key, What

CPU = torch.device("cpu")
_INLINE_BYTES = 64


@dataclass(frozen=True)
class Parcel:
    """A message ready to be sent: header bytes and the bytes of the tensors that follow."""

    header: bytes
    tensors: list[Tensor]


def pack(
    key: Key,
    message: Any,
    place: Callable[[Tensor], Any] = lambda _: None,
    device: torch.device = CPU,
) -> Parcel:
    """Describes a message.

    ``place`` puts a tensor where the receiver finds it and says where that is, in words; for None
    its bytes follow behind the header. ``device``: from where these are sent.
    """
    tensors: list[dict[str, Any]] = []
    bodies: list[Tensor] = []

    def describe(tensor: Tensor) -> int:
        grad, tensor = tensor.requires_grad, tensor.detach()
        if not nest.is_dense(tensor):
            tensor = tensor.contiguous()
        size, stride = list(tensor.size()), list(tensor.stride())
        words = {"dtype": nest.dtype_name(tensor.dtype), "size": size, "stride": stride}
        tensors.append(words | {"grad": grad})
        if (found := place(tensor)) is not None:
            tensors[-1]["place"] = found
            return len(tensors) - 1
        flat = tensor.to(device).as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        if len(flat) <= _INLINE_BYTES and device == CPU:
            tensors[-1]["inline"] = bytes(flat.tolist()).hex()
        else:
            bodies.append(flat)
        return len(tensors) - 1

    try:
        words = nest.to_words(message, describe)
    except nest.NoWords as error:
        raise StageError(
            f"{error} cannot travel between processes: pass dense tensors, None, numbers and"
            " strings in tuples, lists and dicts."
        ) from None
    header = json.dumps({"key": list(key), "nest": words, "tensors": tensors}).encode()
    return Parcel(header, bodies)


def _nowhere(words: Any, _count: int) -> Tensor:
    raise ValueError(f"nobody knows the place {words!r}")


class Arrival:
    """A message of which the header is here: buffers to receive into, then the message itself."""

    def __init__(
        self,
        header: bytes,
        find: Callable[[Any, int], Tensor] = _nowhere,
        device: torch.device = CPU,
    ) -> None:
        """``find``: so many bytes where ``place`` of the sender has put them."""
        self._flat: list[Tensor] = []
        self.buffers: list[Tensor] = []
        """Fresh for every message, so nothing that refers to an older one is overwritten."""
        with _refusing_other_words():
            words = json.loads(header)
            self.key = _key(*words["key"])
            self._nest = words["nest"]
            self._tensors = words["tensors"]
            for tensor in self._tensors:
                count = torch.Size(tensor["size"]).numel()
                count *= nest.dtype_named(tensor["dtype"]).itemsize
                if "inline" in tensor:
                    inline = list(bytes.fromhex(tensor["inline"]))
                    self._flat.append(torch.tensor(inline, dtype=torch.uint8))
                elif "place" in tensor:
                    self._flat.append(find(tensor["place"], count))
                else:
                    self.buffers.append(torch.empty(count, dtype=torch.uint8, device=device))
                    self._flat.append(self.buffers[-1])

    def message(self, device: torch.device | None = None) -> Any:
        """The nest, once the buffers are full; on a device, or where its bytes have arrived."""
        with _refusing_other_words():
            tensors = [
                nest.view(flat, words["dtype"], words["size"], words["stride"])
                .to(flat.device if device is None else device)
                .requires_grad_(words["grad"])
                for flat, words in zip(self._flat, self._tensors, strict=True)
            ]
            return nest.from_words(self._nest, tensors)


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
