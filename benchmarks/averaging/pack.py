"""CIFAR-10 as plain arrays in parts of 29.3 MiB, small enough to be sent one or two at a time.

python -m benchmarks.averaging.pack cifar-10-batches-py.tar.xz parts
"""

import argparse
import io
import pickle
import tarfile
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

# Each batch of the original, the part it becomes, and its published md5.
BATCHES = {
    "data_batch_1": ("train", 0, "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": ("train", 1, "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": ("train", 2, "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": ("train", 3, "634d18415352ddfa80567beed471001a"),
    "data_batch_5": ("train", 4, "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": ("test", 0, "40351d587109b95175f43aff81a1287e"),
}


def names_of(split: str, number: int) -> tuple[str, str]:
    """The files of one part: images and labels."""
    return f"{split}_images_{number}.npy", f"{split}_labels_{number}.npy"


def batches_in(source: Path) -> Iterator[tuple[str, bytes]]:
    """The original batches, from an archive of them or a folder with them."""
    if source.is_dir():
        for name in BATCHES:
            found = next(iter(sorted(source.rglob(name))), None)
            if found is not None:
                yield name, found.read_bytes()
        return
    with tarfile.open(source) as archive:
        for member in archive:
            name = Path(member.name).name
            if name in BATCHES and (file := archive.extractfile(member)) is not None:
                yield name, file.read()


def decoded(batch: bytes) -> tuple[Bytes, Bytes]:
    """Images, rows x 3 x 32 x 32, and labels of one original batch."""
    found = pickle.load(io.BytesIO(batch), encoding="bytes")
    images = np.asarray(found[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    return images, np.asarray(found[b"labels"], dtype=np.uint8)


def pack(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")  # data never joins the repository
    left = dict(BATCHES)
    for name, batch in batches_in(source):
        split, number, published = left.pop(name)
        # Before it is unpickled: a pickle from elsewhere could run anything.
        if (found := md5(batch, usedforsecurity=False).hexdigest()) != published:
            raise SystemExit(f"{name} has md5 {found}, the published one is {published}.")
        for path, array in zip(names_of(split, number), decoded(batch), strict=True):
            np.save(folder / path, array)
        print(f"{name} -> {folder / names_of(split, number)[0]}", flush=True)
    if left:
        raise SystemExit(f"{source} lacks {', '.join(left)}: is it all of CIFAR-10?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("source", type=Path, help="cifar-10-batches-py, as an archive or a folder")
    parser.add_argument("folder", type=Path, help="where the parts go")
    arguments = parser.parse_args()
    pack(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()
