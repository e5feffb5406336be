"""Data-parallel training over slow links: who waits for the network, and for how long.

Hosts are network namespaces, links are limited by tbf; needs Linux, root and iproute2. On an
otherwise idle machine with a core per host:

    python benchmarks/slow_link/run.py --out benchmarks/slow_link/results.jsonl
    python benchmarks/slow_link/run.py --table --out benchmarks/slow_link/results.jsonl
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.slow_link.contestants import EVERY, KEEP_MEMORY, SPECS, Compute, Work
from benchmarks.slow_link.network import PORT, Host, Skipped, hosts
from benchmarks.slow_link.summary import claims, details, quietness, table
from benchmarks.stored import read_result, write_result

ROOT = Path(__file__).resolve().parents[2]


def work_of(compute: Compute, arguments: argparse.Namespace) -> Work:
    sleeps = compute == "sleep"
    return Work(
        compute=compute,
        width=arguments.width,
        layers=arguments.layers,
        rows=4 if sleeps else arguments.rows,
        sleep_s=arguments.sleep_ms / 1000 if sleeps else 0.0,
    )


def measure(work: Work, network: list[Host], arguments: argparse.Namespace) -> dict[str, Any]:
    """One process per host from beginning to end; returns what all of them measured."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slow-link-") as name:
        files = [Path(name) / f"host-{host.rank}.json" for host in network]
        children = [
            start(host, network, work, file, arguments)
            for host, file in zip(network, files, strict=True)
        ]
        try:
            wait_for(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
        found = [json.loads(file.read_text()) for file in files]
    shared = ("round", "mbit", "name", "repeats")
    turns = [
        {
            **{key: same[0][key] for key in shared},
            "hosts": [
                {key: value for key, value in turn.items() if key not in shared} for turn in same
            ],
        }
        for same in zip(*(host["turns"] for host in found), strict=True)
    ]
    return {
        "setting": {
            "hosts": len(network),
            "rates": arguments.rates,
            "rounds": 1 + max(turn["round"] for turn in turns),
            "work": asdict(work),
            "parameter_bytes": 4 * work.parameters,
            "contestants": {
                spec.name: {
                    "every": spec.every,
                    "delay": spec.delay,
                    "what": repr(spec.averaging or spec.kind),
                }
                for spec in SPECS
            },
            "duration_s": round(time.monotonic() - began, 1),
        },
        "environment": environment() | {"torch": found[0]["torch"]},
        "averages": found[0]["averages"],
        "turns": turns,
    }


def start(
    host: Host, network: list[Host], work: Work, out: Path, arguments: argparse.Namespace
) -> subprocess.Popen[bytes]:
    cores = sorted(os.sched_getaffinity(0))
    job = {
        "host": host.to_dict(),
        "work": asdict(work),
        "core": cores[host.rank % len(cores)],
        "rates": arguments.rates,
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "minutes": arguments.minutes,
        "out": str(out),
    }
    # The sources beside which this file lies come last: PYTHONPATH can name others.
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "src")]
    variables = {
        **os.environ,
        **KEEP_MEMORY,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "RANK": str(host.rank),
        "WORLD_SIZE": str(len(network)),
        "MASTER_ADDR": network[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "cable",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # there is no name service in these namespaces
    }
    command = [
        "ip", "netns", "exec", host.namespace,
        sys.executable, "-m", "benchmarks.slow_link.job", json.dumps(job),
    ]  # fmt: skip
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL)


def wait_for(children: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well; the first failure ends the run."""
    while any(child.poll() is None for child in children):
        if any(child.poll() not in (None, 0) for child in children):
            break
        time.sleep(0.2)
    if any(child.poll() != 0 for child in children):
        sys.exit("a host failed; its own words are above")


def environment() -> dict[str, Any]:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "load_average_after": os.getloadavg()[0],
    }


def save(results: dict[str, Any], out: Path) -> None:
    write_result(out, results, "*.turns.*", "*.averages.*")


def show(results: dict[str, Any]) -> None:
    for compute, result in results.items():
        work = "real work" if compute == "real" else "work made by sleeping"
        size = result["setting"]["parameter_bytes"] / 1e6
        print(f"\n{work}, {result['setting']['hosts']} hosts, {size:.1f} MB of weights\n")
        print(table(result), "\n")
        print(details(result), "\n")
        print("\n".join(claims(result)))
        print(quietness(result), flush=True)


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results.jsonl",
        help="results to write (--table: read); what is not measured again stays in it",
    )  # fmt: skip
    parser.add_argument("--compute", choices=["real", "sleep", "both"], default="both")
    parser.add_argument("--hosts", type=int, default=2, choices=[2, 3, 4])
    parser.add_argument(
        "--rates", type=lambda text: [float(word) for word in text.split(",")],
        default=[600.0, 300.0, 120.0, 60.0, 40.0], help="Mbit/s, comma-separated",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=15.0, help="no round begun beyond that")
    parser.add_argument("--steps", type=int, default=16, help="timed in a turn")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=3200, help="real: of a replica's batch")
    parser.add_argument("--sleep-ms", type=float, default=80.0, help="sleeping: of a step")
    parser.add_argument("--table", action="store_true", help="print the tables of a stored result")
    arguments = parser.parse_args()
    if arguments.steps < EVERY or arguments.steps % EVERY:
        parser.error(f"--steps: whole rounds are timed, so give a multiple of {EVERY}")
    return arguments


def main() -> None:
    arguments = arguments_of()
    if arguments.table:
        show(read_result(arguments.out))
        return
    wanted: list[Compute] = ["real", "sleep"]
    if arguments.compute != "both":
        wanted = [arguments.compute]
    results: dict[str, Any] = {}
    if arguments.out.exists():
        results = read_result(arguments.out)
    measured: dict[str, Any] = {}
    try:
        cores = len(os.sched_getaffinity(0))
        if "real" in wanted and cores < arguments.hosts:
            raise Skipped(f"real work needs a core per host; there are {cores} for"
                          f" {arguments.hosts} hosts")  # fmt: skip
        with hosts(arguments.hosts) as network:
            for compute in wanted:
                work = work_of(compute, arguments)
                print(work, flush=True)
                measured[compute] = measure(work, network, arguments)
                save(results | measured, arguments.out)
    except Skipped as reason:
        print(f"skipped: {reason}")
        return
    show(measured)
    print(f"\nraw results: {arguments.out}")


if __name__ == "__main__":
    main()
