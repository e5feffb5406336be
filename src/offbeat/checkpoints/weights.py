"""Weights alone, as a file that every reader of safetensors reads.

A tensor with two names is stored under the first; the file's words say of the second whose it is,
as ``safetensors.torch.save_model`` has it. What is no tensor stands in the words, too.
"""

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offbeat import nest
from offbeat.checkpoints import tensorfile
from offbeat.errors import CheckpointError
from offbeat.records import disk

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""What safetensors calls types of tensors. Others are stored as bytes, with the type in words."""
_TYPES = {name: kind for kind, name in _NAMES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The files in a folder of transformers': all weights in one, or where those of several are."""
_VALUES, _KIND = "offbeat.values", "offbeat.type of "


def load_weights(path: str | PathLike[str]) -> dict[str, Any]:
    """The weights in a file of safetensors, or in one of ``torch.save`` that ends in ``.pt``.

    On the CPU, for ``load_state_dict``; names of the same tensor share its memory.
    """
    path = Path(path)
    try:
        if path.suffix in (".pt", ".pth"):
            found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
            return found
        return from_bytes(bytearray(path.read_bytes()))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception:  # of all kinds, by bytes that are something else
        raise CheckpointError(
            f"{path} holds no weights, or it is damaged: give a file of safetensors, or one that"
            " torch.save wrote of weights alone, with a name that ends in .pt."
        ) from None


class Shelf(Mapping[str, Any]):
    """Weights in files of safetensors, each read from the disk when it is asked for."""

    def __init__(self, files: Mapping[Path, Sequence[str] | None]) -> None:
        """``files``: and which names of each count; None for all."""
        self._headers: dict[Path, tuple[dict[str, Any], dict[str, str], int]] = {}
        self._files: dict[str, Path] = {}
        self._others: dict[str, Any] = {}
        """What is no plain tensor."""
        for path, names in files.items():
            header, words, _ = self._headers[path] = _header_of(path)
            if _VALUES in words:
                self._others |= tensorfile.from_bytes(b64decode(words[_VALUES]))
            found = [*header, *(name for name, first in words.items() if first in header)]
            if missing := set(names or ()) - {*found}:
                raise CheckpointError(
                    f"{path} has no {min(missing)!r}, and the index beside it says so: the folder"
                    " was not copied whole, or it is damaged."
                )
            self._files |= dict.fromkeys(found if names is None else names, path)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._files, **self._others})

    def __len__(self) -> int:
        return len({**self._files, **self._others})

    def __getitem__(self, name: str) -> Any:
        if name in self._others:
            return self._others[name]
        path = self._files[name]
        entry, kind, shape, begin = self._entry(name)
        first, end = entry["data_offsets"]
        flat = torch.empty(end - first, dtype=torch.uint8)
        with path.open("rb") as file:
            file.seek(begin + first)
            if end > first and file.readinto(flat.numpy().data) != end - first:
                raise CheckpointError(f"{path} ends before {name!r} does: it is damaged.")
        return flat.view(kind).reshape(shape)

    def shapes(self) -> dict[str, Any]:
        """Tensors on meta in the place of those in the files, which are not read."""
        found = dict(self._others)
        for name in self._files:
            _, kind, shape, _ = self._entry(name)
            found[name] = torch.empty(shape, dtype=kind, device="meta")
        return found

    def _entry(self, name: str) -> tuple[dict[str, Any], torch.dtype, list[int], int]:
        header, words, begin = self._headers[self._files[name]]
        name = name if name in header else words[name]
        kind, *shape = json.loads(words.get(_KIND + name, "[null]"))
        if kind is None:
            kind, shape = _TYPES[header[name]["dtype"]], header[name]["shape"]
        return header[name], nest.dtype_named(kind), shape, begin


def open_weights(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The weights in a file, or in a folder as ``save_pretrained`` writes it.

    Of safetensors each is read when it is asked for.
    """
    path = Path(path)
    index, single = path / INDEX, path / SINGLE
    if path.suffix in (".pt", ".pth"):
        return load_weights(path)
    if path.is_dir() and not single.is_file() and index.is_file():
        files: dict[Path, list[str]] = {}
        try:
            for name, file in json.loads(index.read_text())["weight_map"].items():
                if Path(file).name != file:
                    raise ValueError(file)
                files.setdefault(path / file, []).append(name)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CheckpointError(
                f"{index} is no index of safetensors, or it is damaged."
            ) from None
        return Shelf(files)
    if path.is_dir() and not single.is_file():
        raise CheckpointError(
            f"{path} holds neither {SINGLE} nor {INDEX}: give a file of safetensors, or a folder"
            " that save_pretrained wrote (a pytorch_model.bin has to be saved anew as safetensors)."
        )
    return Shelf({single if path.is_dir() else path: None})


def _header_of(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """The entries of a file, its words, and where its tensors begin."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError("the header would be longer than the file")
            header = json.loads(file.read(length))
        words = header.pop("__metadata__", {})
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            if not 0 <= first <= end <= size - 8 - length or entry["dtype"] not in _TYPES:
                raise ValueError(f"{name!r} lies outside of the file, or is of no known type")
        return header, words, 8 + length
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except Exception:  # of all kinds, by bytes that are something else
        raise CheckpointError(
            f"{path} holds no weights, or it is damaged: give a file of safetensors, or a folder"
            " that save_pretrained wrote."
        ) from None


def save_weights(state: Mapping[str, Any], path: Path) -> None:
    """Writes what :func:`load_weights` reads, by ``torch.save`` where the name ends in ``.pt``."""
    if path.suffix in (".pt", ".pth"):
        memory = BytesIO()
        torch.save(dict(state), memory)
        disk.write(path, [memory.getbuffer()])
    else:
        disk.write(path, to_chunks(state))


def to_chunks(state: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """What a file of these weights holds."""
    words: dict[str, str] = {"format": "pt"}
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        if not _is_plain(value):
            others[name] = value
        else:
            value = value.detach().resolve_conj().resolve_neg()
            same = (value.data_ptr(), value.dtype, value.shape, value.stride())
            first = names.setdefault(same, name) if value.numel() else name
            if first != name:
                words[name] = first
                continue
            tensors[name] = value.contiguous()
            if nest.dtype_name(value.dtype) not in _NAMES:
                words[_KIND + name] = json.dumps([nest.dtype_name(value.dtype), *value.shape])
                flat = tensors[name].as_strided((value.numel(),), (1,))
                tensors[name] = flat.view(torch.uint8)
    if others:
        try:
            words[_VALUES] = b64encode(tensorfile.to_bytes(others)).decode()
        except CheckpointError:
            raise CheckpointError(
                f"{', '.join(others)} cannot be stored: it is no dense tensor, and holds more than"
                " plain values. Let get_extra_state return tensors, numbers and text."
            ) from None
    entries: dict[str, Any] = {"__metadata__": words} | dict.fromkeys(tensors)
    place = 0
    # Large elements first, so that each lies at a multiple of its size.
    in_order = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for name, tensor in in_order:
        end = place + tensor.nbytes
        dtype = _NAMES[nest.dtype_name(tensor.dtype)]
        entries[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [place, end]}
        place = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    yield struct.pack("<Q", len(header)) + header
    for _, tensor in in_order:
        if tensor.numel():
            flat = tensor.cpu().as_strided((tensor.numel(),), (1,))  # whatever a 1 has for a stride
            yield memoryview(flat.view(torch.uint8).numpy().data)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


def from_bytes(data: bytearray) -> dict[str, Any]:
    """Raises anything where these are no such bytes."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    words = header.pop("__metadata__", {})
    memory = torch.frombuffer(data, dtype=torch.uint8)[8 + length :]
    state: dict[str, Any] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        kind, *shape = json.loads(words.pop(_KIND + name, "[null]"))
        if kind is None:
            kind, shape = _TYPES[entry["dtype"]], entry["shape"]
        if not 0 <= begin <= end <= len(memory):
            raise ValueError(f"{name!r} lies outside of the file")
        part = memory[begin:end].clone()  # where any type may lie
        state[name] = part.view(nest.dtype_named(kind)).reshape(shape)
    if _VALUES in words:
        state |= tensorfile.from_bytes(b64decode(words.pop(_VALUES)))
    ties = {name: first for name, first in words.items() if first in header and name not in header}
    return state | {name: state[first] for name, first in ties.items()}
