"""How fast the methods of the set "table" train ResNet-56 on one GPU, in two to four stages.

The published seconds are of as many GPUs as stages. Here all stages share one, side by side, and
the base is plain training as one CUDA graph. Contestants take turns, as in benchmarks/one_gpu.

    python -m benchmarks.accuracy.speed --out benchmarks/accuracy/table-speed.json
"""

import argparse
import json
from functools import partial
from pathlib import Path

from benchmarks.accuracy.configurations import OF_THE_TABLE, SETS
from benchmarks.one_gpu.contestants import Step, graph
from benchmarks.one_gpu.run import Contestant, compete, result_of
from benchmarks.one_gpu.workloads import Workload
from benchmarks.pool import need

import offbeat
from offbeat.methods import Method

WORKLOAD = "resnet-56-128-bf16-channels-last"
WARM_UP = 40


def in_stages(workload: Workload, method: Method, cuts: tuple[int, ...]) -> Step:
    trainer = offbeat.Trainer(
        workload.made(),
        loss=workload.loss,
        optimizer=workload.optimizer,
        method=method,
        cuts=list(cuts),
        autocast=workload.autocast,
        engine="streams",
    )
    return trainer.step


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the methods in the published table.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("table-speed.json"))
    arguments = parser.parse_args()
    need("cuda")
    contestants = {"BP": Contestant(WORKLOAD, graph, WARM_UP)}
    for cut in SETS["table"].cuts:
        assert cut.cuts is not None
        for name, way in OF_THE_TABLE.items():
            make = partial(in_stages, method=way.method(1000), cuts=cut.cuts)
            contestants[f"{name}, K={len(cut.cuts) + 1}"] = Contestant(WORKLOAD, make, WARM_UP)
    rows = compete(contestants, arguments.turns)
    for contestant in contestants.values():
        contestant.leave()
    arguments.out.write_text(json.dumps(result_of(WORKLOAD, rows), indent=1) + "\n")
    for name, row in rows.items():
        said = row.get("error") or f"{row['ms']:.2f} ms, {rows['BP']['ms'] / row['ms']:.2f} of BP"
        print(f"{name:24} {said}", flush=True)


if __name__ == "__main__":
    main()
