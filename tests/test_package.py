"""What is installed is what was written: a wheel, built from the sdist, trains where it is fresh.

The environment borrows the packages that are installed here, torch among them; the copy of offbeat
that this checkout installs is not among what it sees.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")
BUILD = (
    "import setuptools.build_meta as build, sys; print(getattr(build, sys.argv[1])(sys.argv[2]))"
)

QUICK_START = """
    import sys, torch, offbeat
    from offbeat.zoo import digits_cnn

    assert offbeat.__file__.startswith(sys.prefix), offbeat.__file__
    trainer = offbeat.Trainer(
        digits_cnn(),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        method="stale-weights",
        stages=4,
    )
    for _ in range(8):
        trainer.step(torch.randn(8, 1, 8, 8), torch.randint(10, (8,)))
    trainer.flush()
    print(trainer.lags)
"""


def run(*words: str | Path, where: Path) -> str:
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, words)],
        cwd=where, env=own, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer that finds no wheel would."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "copy"
    for name in SOURCES:
        source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__", "*.egg-info")
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
    run(sys.executable, "-c", BUILD, "build_sdist", folder, where=copy)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", BUILD, "build_wheel", folder, where=unpacked)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("offbeat/")}
    source = ROOT / "src"
    own = {str(p.relative_to(source)) for p in (source / "offbeat").rglob("*") if p.is_file()}
    assert packed == {name for name in own if "__pycache__" not in name}


def test_the_wheel_trains_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False, symlinks=True)
    (site,) = fresh.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")  # behind its own packages
    python = fresh / "bin" / "python"
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    run(python, *pip, "--no-index", "--target", site, wheel, where=tmp_path)
    assert run(python, "-c", textwrap.dedent(QUICK_START), where=tmp_path) == "(6, 4, 2, 0)\n"
    assert "stale-weights" in run(python, "-m", "offbeat", "methods", where=tmp_path)
