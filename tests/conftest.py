"""One thread per test process: two of them share two cores, and thread counts change bits."""

import pytest
import torch

import forks

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout its setting in pyproject.toml is known all the same, and ignored."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take, for pytest-timeout")


@pytest.fixture(autouse=True)
def processes_are_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of ``offbeat.launch`` come from a process that has imported PyTorch already."""
    if request.node.get_closest_marker("fresh_processes") is None:
        monkeypatch.setattr("offbeat.engines.launcher.subprocess", forks)
