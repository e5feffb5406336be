"""One thread per test process: two of them share two cores, and thread counts change bits."""

import pytest
import torch

import forks

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout its setting in pyproject.toml is known all the same, and ignored."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds a test may take, for pytest-timeout")
    words = "run one part of the tests that are left, such as 2/4: the second of four"
    parser.addoption("--part", metavar="K/N", default="1/1", help=words)


@pytest.hookimpl(trylast=True)  # of what -m and -k leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, parts = map(int, config.getoption("part").split("/"))
    if not 1 <= number <= parts:
        raise pytest.UsageError(f"--part {number}/{parts}: give a number from 1 to {parts}")
    others = [item for place, item in enumerate(items) if place % parts != number - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = items[number - 1 :: parts]


@pytest.fixture(autouse=True)
def processes_are_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of ``offbeat.launch`` come from a process that has imported PyTorch already."""
    if request.node.get_closest_marker("fresh_processes") is None:
        monkeypatch.setattr("offbeat.engines.launcher.subprocess", forks)
