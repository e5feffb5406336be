"""Nests: what may travel between stages: tensors in tuples, lists, dicts, with None and values.

Messages and checkpoints write a nest in the same words, which JSON can hold: ``to_words`` and
``from_words``. Where the bytes of the tensors are is for each of them to say.
"""

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Nest = Any


class Bundle(NamedTuple):
    """What a stage is given, and weights of earlier stages that it or a later one uses."""

    given: Nest
    ties: dict[str, Tensor]


class Parts(tuple[Any, ...]):
    """A batch that comes in its parts, which may be of different sizes and need no splitting.

    For several replicas of one process: one of these for each of them.
    """


_KNOWN = (Tensor, bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def tensors(nest: Nest) -> list[Tensor]:
    """All tensors of a nest, always in the same order."""
    if isinstance(nest, Tensor):
        return [nest]
    found: list[Tensor] = []
    replace(nest, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def replace(nest: Nest, function: Callable[[Tensor], Any]) -> Nest:
    """The same nest with ``function`` applied to every tensor."""
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(replace(part, function) for part in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(replace(part, function) for part in nest)
    if isinstance(nest, dict):
        same = copy(nest)  # keeps what a kind of dict may carry beside its items
        for key, part in nest.items():
            same[key] = replace(part, function)
        return same
    return nest


def stranger(nest: Nest) -> Any:
    """The first part that is neither tensor, container nor plain value; it may hide tensors."""
    if isinstance(nest, dict):
        nest = tuple(nest.values())
    if isinstance(nest, (tuple, list)):
        return next((found for part in nest if (found := stranger(part)) is not None), None)
    return None if nest is None or isinstance(nest, _KNOWN) else nest


def copied(nest: Nest) -> Nest:
    """The same in memory of its own, but for weights, which nobody writes."""
    if isinstance(nest, Bundle):
        return Bundle(copied(nest.given), nest.ties)
    return replace(nest, lambda tensor: tensor.clone())


def plain(nest: Nest) -> Nest:
    """The same nest with dicts in the place of mappings that are none, such as a BatchEncoding."""
    if isinstance(nest, Mapping):
        values = {key: plain(part) for key, part in nest.items()}
        same = isinstance(nest, dict) and all(values[key] is nest[key] for key in values)
        return nest if same else values
    if type(nest) in (tuple, list):
        parts = [plain(part) for part in nest]
        same = all(one is other for one, other in zip(parts, nest, strict=True))
        return nest if same else type(nest)(parts)
    return nest


def rid_of_kinds(nest: Nest) -> Nest:
    """The same nest in tuples, lists and dicts alone, as another process would receive it."""
    if isinstance(nest, Mapping):
        return {key: rid_of_kinds(part) for key, part in nest.items()}
    if isinstance(nest, tuple | list):
        kind = tuple if isinstance(nest, tuple) else list
        return kind(rid_of_kinds(part) for part in nest)
    return nest


def detached(nest: Nest) -> Nest:
    """The same values as leaves of a graph to come, which get gradients where these would."""
    return replace(nest, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def split(nest: Nest, parts: int) -> list[Nest]:
    """A nest per micro-batch: every tensor cut along its rows as ``tensor_split`` does."""
    if isinstance(nest, Parts):
        return list(nest)
    if parts == 1:
        return [nest]
    pieces = {id(tensor): tensor.tensor_split(parts) for tensor in tensors(nest)}
    return [replace(nest, lambda t, i=i: pieces[id(t)][i]) for i in range(parts)]  # type: ignore[misc]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without holes, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# ------------------------------------------------------------------------- in words


class NoWords(TypeError):
    """This has no words, and leaving it out would lose it. Says what it is."""


def to_words(nest: Nest, number: Callable[[Tensor], int]) -> Any:
    """JSON for a nest. ``number`` takes every tensor and says how the words are to call it.

    What comes back from these words has the same values and the same types.
    """
    kind = type(nest)
    if nest is None or kind in (bool, int, float, str):
        return nest
    if isinstance(nest, Tensor):
        return {"tensor": number(_plain(nest))}
    if kind is list:
        return [to_words(part, number) for part in nest]
    if kind in (tuple, torch.Size):
        name = "tuple" if kind is tuple else "size"
        return {name: [to_words(part, number) for part in nest]}
    if kind is Bundle:
        return {"bundle": [to_words(part, number) for part in nest]}
    if kind in (dict, Counter):
        name = "dict" if kind is dict else "counter"
        pairs = nest.items()
        return {name: [[to_words(key, number), to_words(part, number)] for key, part in pairs]}
    if kind is bytes:
        return {"bytes": b64encode(nest).decode()}
    if kind is complex:
        return {"complex": [nest.real, nest.imag]}
    if isinstance(nest, np.number | np.bool_):
        return {"numpy": [nest.dtype.str, nest.tobytes().hex()]}
    if kind is torch.dtype:
        return {"dtype": dtype_name(nest)}
    if kind is torch.device:
        return {"device": str(nest)}
    raise NoWords(f"a {_type_name(nest)}")


def from_words(words: Any, tensors: Sequence[Tensor]) -> Nest:
    """The nest again, with tensors by their numbers; raises where these are no such words."""
    if isinstance(words, list):
        return [from_words(part, tensors) for part in words]
    if not isinstance(words, dict):
        return words
    ((kind, inner),) = words.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("tuple", "size"):
        parts = (from_words(part, tensors) for part in inner)
        return tuple(parts) if kind == "tuple" else torch.Size(parts)
    if kind == "bundle":
        given, ties = (from_words(part, tensors) for part in inner)
        return Bundle(given, dict(ties))
    if kind in ("dict", "counter"):
        pairs = {from_words(key, tensors): from_words(part, tensors) for key, part in inner}
        return pairs if kind == "dict" else Counter(pairs)
    if kind == "bytes":
        return b64decode(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "numpy":
        return np.frombuffer(bytes.fromhex(inner[1]), np.dtype(inner[0]))[0]
    if kind == "dtype":
        return dtype_named(inner)
    if kind == "device":
        return torch.device(inner)
    raise ValueError(f"{kind!r} is no part of a nest")


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as bytes in memory show it."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NoWords(f"a tensor of layout {tensor.layout}")
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        raise NoWords(f"a tensor of type {_type_name(tensor)} on {tensor.device}")
    return tensor.resolve_conj().resolve_neg()


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensor")
    return dtype


def view(memory: Tensor, dtype: str, size: list[int], stride: list[int], offset: int = 0) -> Tensor:
    """A tensor over bytes in memory."""
    kind = dtype_named(dtype)
    if any(number < 0 for number in (*size, *stride, offset)):
        raise ValueError(f"a tensor of sizes {size} and strides {stride} from {offset} on")
    whole = memory[: len(memory) // kind.itemsize * kind.itemsize].view(kind)
    return whole.as_strided(size, stride, offset)
