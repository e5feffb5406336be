"""The first bytes of enwik8, or all of tiny-shakespeare, as one array small enough to be sent.

python -m benchmarks.language.pack /work/shared/data/enwik8/enwik8.xz enwik8
"""

import argparse
import lzma
from pathlib import Path

import numpy as np

BYTES = 20_000_000
FILE = "tokens.npy"


def pack(source: Path, folder: Path, size: int = BYTES) -> int:
    """Writes at most ``size`` bytes of a text, or of one in xz, and says how many."""
    with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as file:
        text = file.read(size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")  # data never joins the repository
    np.save(folder / FILE, np.frombuffer(text, dtype=np.uint8))
    return len(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs a text for the language benchmark.")
    parser.add_argument("source", type=Path, help="enwik8.xz, or any text")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, default=BYTES)
    arguments = parser.parse_args()
    print(f"{pack(arguments.source, arguments.folder, arguments.bytes)} tokens")


if __name__ == "__main__":
    main()
