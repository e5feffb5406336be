"""Tests that need an NVIDIA GPU: ``python3 -m pytest tests/gpu`` there.

They need pytest, torch and numpy, no plugin and no installation. Every test of this folder gets
the mark ``gpu`` and is skipped where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m selects by the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True, scope="session")
def deterministic() -> Iterator[None]:
    """Bits can only be compared where the same kernels run every time."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    patch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    patch.undo()
