"""Which engine a trainer gets: the one asked for, or the one its script was started for."""

from typing import Literal, get_args

from offbeat.cutting.cut import Cut
from offbeat.engines import checks
from offbeat.engines.base import Engine
from offbeat.engines.guests import refuse_sync_batch_norm
from offbeat.engines.machines import Machines, checked_machines
from offbeat.engines.processes import Processes
from offbeat.engines.serial import Serial
from offbeat.engines.setup import Setup
from offbeat.engines.streams import Streams
from offbeat.engines.world import is_launched
from offbeat.errors import ConfigurationError, unknown

EngineName = Literal["serial", "processes", "streams"]
ENGINES: tuple[str, ...] = get_args(EngineName)


def start_engine(
    name: str | None,
    cut: Cut,
    setup: Setup,
    timeout: float,
    when_replica_dies: str,
    machines: Machines | None,
) -> Engine:
    """Starts an engine; that of many processes returns when all have joined."""
    kind = _choose(name)
    checks.check_balance(setup.balance, kind, cut)
    checks.check_compile(setup.compile, setup.autocast, (m for m, _ in setup.course.phases))
    timeout = checks.checked_timeout(timeout)
    where = checked_machines(machines)
    outlive = checks.outlives(when_replica_dies, setup.averaging)
    if kind == "processes":
        refuse_sync_batch_norm(cut.model)
        return Processes(
            cut.stages,
            setup.replicas,
            setup.device,
            timeout,
            where,
            outlive=outlive,
            in_circles=setup.averages_with_some,
        )
    where.counts(cut.stages, 1, setup.replicas)
    if kind == "streams":
        checks.check_streams(setup.device, setup.replicas, setup.averaging, setup.guards)
        return Streams(cut.stages, setup.device)
    return Serial(cut.stages, setup.replicas)


def _choose(name: str | None) -> str:
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
            "engine='processes' needs several processes: start the script with"
            " torchrun --nproc-per-node K, or use offbeat.launch."
        )
    return name or ("processes" if launched else "serial")
