"""Which engine a trainer gets: the one asked for, or the one its script was started for."""

from offbeat.engines import checks
from offbeat.engines.base import Engine
from offbeat.engines.processes import Processes
from offbeat.engines.serial import Serial
from offbeat.engines.setup import Setup
from offbeat.engines.streams import Streams
from offbeat.engines.world import is_launched
from offbeat.errors import ConfigurationError, unknown

ENGINES = ("serial", "processes", "streams")


def choose_engine(name: str | None) -> str:
    """The name asked for, if the script was started for it."""
    launched = is_launched()
    if name not in (None, *ENGINES):
        raise unknown("engine", name, ENGINES)
    if name == "streams" and launched:
        raise ConfigurationError(
            "engine='streams' runs all stages in one process, and torchrun has started several:"
            " start the script with python, or leave out engine."
        )
    if name == "processes" and not launched:
        raise ConfigurationError(
            "engine='processes' needs one process per stage: start the script with"
            " torchrun --nproc-per-node K, or use offbeat.launch."
        )
    return name or ("processes" if launched else "serial")


def start_engine(
    name: str, stages: int, setup: Setup, timeout: float, when_replica_dies: str
) -> Engine:
    """Starts an engine; that of many processes returns when all have joined."""
    timeout = checks.checked_timeout(timeout)
    outlive = checks.outlives(when_replica_dies, setup.averaging)
    if name == "streams":
        checks.check_streams(setup.device, setup.replicas, setup.averaging, setup.guards)
        return Streams(stages, setup.device)
    if name == "processes":
        return Processes(stages, setup.replicas, setup.device, timeout, outlive=outlive)
    return Serial(stages, setup.replicas)
