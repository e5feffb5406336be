"""``offbeat train``, ``study`` and ``report``: from flags to a stored run, and every refusal."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from offbeat.app import cli
from offbeat.app.build import build, scheduler_factory
from offbeat.app.cli.live import Screen
from offbeat.app.cli.report import runs_in
from offbeat.app.experiment import Experiment
from offbeat.app.progress import Progress
from offbeat.app.report.page import page
from offbeat.app.results import command_of
from offbeat.app.runs import Run
from offbeat.app.study import cells_of
from offbeat.app.training import run_experiment
from offbeat.checkpoints import load_weights
from offbeat.records.readings import Readings
from offbeat.registry import Choice
from offbeat.trainer import Trainer
from offbeat.zoo import data_named

SHORT = ["--epochs", "1", "--lr", "0.02"]


def offbeat_says(*words: str) -> int:
    """Runs a command in this process; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    code = ended.value.code
    return 0 if code is None else int(code)


def train(folder: Path, *words: str) -> Run:
    assert offbeat_says("train", *SHORT, "--out", str(folder), *words) == 0
    return Run.load(folder)


# ------------------------------------------------------------------ what was asked for


def test_flags_and_toml_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "resnet:depth=20"\nbatch-size = 32\nppv = [7]\ndecay = "step"\n'
        '[method]\nname = "adl"\naccumulate = 2\n'
        '[averaging]\nname = "dasgd"\nevery = 4\ndelay = 1\n'
    )
    from_file = Experiment.read(Experiment.from_toml(file))
    from_flags = Experiment.read(
        {
            "model": "resnet:depth=20",
            "batch_size": "32",
            "ppv": "7",
            "decay": "step",
            "method": "adl:accumulate=2",
            "averaging": "dasgd:every=4,delay=1",
        }
    )
    assert from_file == from_flags
    assert from_flags.method == Choice("adl", {"accumulate": 2})
    assert Experiment.read(from_flags.as_dict()) == from_flags
    assert Experiment.read(json.loads(json.dumps(from_flags.as_dict()))) == from_flags


def test_settings_may_hold_tuples_and_words() -> None:
    choice = Choice.read("dsp:lag=(4,2,0),hop=[1, 1],backward=stash,x=true", "--method")
    assert choice.settings == {"lag": (4, 2, 0), "hop": [1, 1], "backward": "stash", "x": True}
    assert Choice.read("adl", "--method") == Choice("adl")


def test_a_run_stores_all_that_decided_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "stale-weights"\nstages = 3\nepochs = 5\n')
    run = train(tmp_path / "run", "--config", str(file))  # flags win: one epoch
    assert run.config["epochs"] == 1
    assert run.config["method"] == {"name": "stale-weights", "settings": {}}
    assert run.config["lags"] == [4, 2, 0]
    assert run.config["versions"]["torch"] == torch.__version__
    assert run.config["threads"] == torch.get_num_threads()
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == 23
    assert set(run.summary["lags"]) == {"0", "1", "2"}
    assert run.summary["lags"]["2"] == {"0": 23}
    assert len(run.summary["memory"]) == 3
    kinds = [line["kind"] for line in run.metrics]
    assert kinds == ["step", "step", "evaluation", "end"]
    assert run.metrics[2]["accuracy"] == run.summary["accuracy"]
    ledger = run.ledger()
    assert ledger is not None
    assert len(ledger) == 3 * 3 * 23
    state = load_weights(run.folder / "model.safetensors")
    experiment = Experiment.read({"method": "stale-weights", "stages": 3, **_short()})
    fresh = build(experiment, data_named("digits"), 23)
    fresh.model.load_state_dict(state)


def test_a_stored_command_can_be_pasted_and_repeats_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"  # a command that named it would be lost with it
    file.write_text('[model]\nname = "mlp"\nhidden = [32, 16]\n')
    run = train(
        tmp_path / "run", "--config", str(file), "--method", "dsp:lag=(2,0)", "--stages", "2",
        "--correction", "predict:horizon=lag + clip-per-stage:times=3", "--seed", "-3", "--monitor",
        "--no-augment", "--milestones", "0.25,0.5", "--clip", "1.5",
    )  # fmt: skip
    threads, *words = shlex.split(run.config["command"])
    assert threads == f"OMP_NUM_THREADS={torch.get_num_threads()}"
    assert words[:2] == ["offbeat", "train"]
    assert "mlp:hidden=32,16" in words
    assert offbeat_says(*words[1:], "--out", str(tmp_path / "again")) == 0
    again = Run.load(tmp_path / "again")
    assert again.config | {"started": ""} == run.config | {"started": ""}
    assert again.summary["loss"] == run.summary["loss"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"averaging": "dasgd:every=4,delay=1", "replicas": 2, "cuts": "2,layer.3"},
        {"milestones": (), "lr": 1e-5, "hybrid": 2, "data_folder": "my data"},
        {"ppv": [2, 5], "compile": True, "max_lag": 3, "engine": "serial"},
    ],
)
def test_every_setting_comes_back_from_the_command(settings: dict[str, Any]) -> None:
    experiment = Experiment.read(settings)
    words = shlex.split(command_of(experiment, 1))[3:]
    given: dict[str, Any] = {}
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        given[name] = True if name == "compile" else words.pop(0)
    assert Experiment.read(given) == experiment


def test_a_command_of_processes_starts_them() -> None:
    command = command_of(Experiment.read({"stages": 2}), 4)
    assert "torchrun --nproc-per-node 4 -m -- offbeat train --stages 2" in command


def _short() -> dict[str, Any]:
    return {"epochs": 1, "lr": 0.02}


def test_hybrid_and_replicas_train(tmp_path: Path) -> None:
    words = ["--method", "stale-weights", "--stages", "2", "--epochs", "2", "--hybrid", "1"]
    hybrid = train(tmp_path / "hybrid", *words)
    assert hybrid.summary["lags"]["0"] == {"0": 24, "1": 1, "2": 21}
    replicas = train(
        tmp_path / "replicas", "--replicas", "2", "--averaging", "dasgd:every=4,delay=1",
        "--drop-last", "--optimizer", "adamw", "--lr", "0.003",
    )  # fmt: skip
    assert replicas.summary["waits"]["1/0"]["averages"] == 5


def test_muon_gets_the_matrices_and_adamw_the_rest() -> None:
    """Made, not stepped: its bfloat16 products are illegal instructions on some CPUs."""
    experiment = Experiment.read({"optimizer": "muon", "model": "mlp", **_short()})
    stage = build(experiment, data_named("digits"), 23)._engine.workers[0].stage
    muon, adamw = stage.optimizers
    assert {p.dim() for p in muon.param_groups[0]["params"]} == {2}
    assert {p.dim() for p in adamw.param_groups[0]["params"]} == {1}


def test_the_live_view_shows_what_matters(tmp_path: Path) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=110)
    experiment = Experiment.read({"method": "dsp", "stages": 3, **_short()})
    run_experiment(experiment, tmp_path / "run", lambda: [Screen(console)])
    for words in ("DSP, 3 stages, lag 4 2 0", "epoch 1/1", "rows/s", "left", "busy", "finished"):
        assert words in drawn.getvalue(), words


def test_a_run_that_goes_on_takes_the_time_of_its_own_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """500 of 1000 steps were taken before; these 10 took 20 s."""
    clock = [0.0]
    monkeypatch.setattr("offbeat.app.cli.live.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    drawn = io.StringIO()
    screen = Screen(Console(file=drawn, force_terminal=True, width=110))
    trainer = build(Experiment.read({"stages": 2, **_short()}), data_named("digits"), 100)
    progress = Progress(10, 100, step=500, epoch=5)
    screen.begin(trainer, progress)
    progress.step, clock[0] = 510, 20.0
    screen.step(trainer, progress)
    screen.end("interrupted")
    assert "16:20 left" in drawn.getvalue()


def test_tensorboard_is_asked_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert offbeat_says("train", *SHORT, "--tensorboard", "--out", str(tmp_path / "run")) == 2
    assert "pip install tensorboard" in capsys.readouterr().err


def test_max_steps_ends_a_run_early(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--max-steps", "5", "--method", "dsp", "--stages", "2")
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 5)
    assert run.summary["lags"]["0"] == {"0": 1, "1": 1, "2": 3}


def test_a_run_that_died_after_its_last_step_takes_no_more(tmp_path: Path) -> None:
    words = ("--max-steps", "6", "--save-every", "3", "--stages", "2")
    train(tmp_path / "run", *words)
    (tmp_path / "run" / "summary.json").unlink()
    again = train(tmp_path / "run", *words, "--resume")
    assert (again.summary["status"], again.summary["steps"]) == ("finished", 6)


def test_schedules_rise_and_fall() -> None:
    def rates(**settings: Any) -> list[float]:
        experiment = Experiment.read({"lr": 1.0, **settings})
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = scheduler_factory(experiment, 10)(optimizer)
        found = []
        for _ in range(10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(decay="constant") == [1.0] * 10
    assert rates(decay="step") == pytest.approx([1.0] * 5 + [0.1] * 3 + [0.01] * 2)
    assert rates(decay="linear")[5] == pytest.approx(0.5)
    cosine = rates(decay="cosine", warmup=2)
    assert cosine[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert cosine == sorted(cosine[:3]) + sorted(cosine[3:], reverse=True)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--epochs", "x"], "epochs='x': give a whole number"),
        (["--epochs", "0"], "epochs=0: give at least 1"),
        (["--momentum", "1.5"], "momentum=1.5: give a number from 0 to below 1"),
        (["--milestones", "0.5,2"], "give shares of the run"),
        (["--averaging", "local-sgd:every=4"], "with one replica has nobody to average with"),
        (["--lr", "-1"], "lr=-1.0: give a number above 0"),
        (["--model", "resnet21"], "resnet"),
        (["--model", "alexnt"], "Did you mean 'alexnet'"),
        (["--data", "cifar11"], "Did you mean 'cifar10'"),
        (["--method", "adll"], "Did you mean 'adl'"),
        (["--method", "adl:acumulate=2"], "adl has no setting 'acumulate'"),
        (["--method", "adl:2"], "settings read name=value"),
        (["--method", "adl:accumulate=2,accumulate=4"], "accumulate is there twice: give one"),
        (["--method", "adl:name=x"], "name is no setting"),
        (["--method", "autto"], "Did you mean 'auto'?"),
        (["--method", "zzz"], "dgl, auto."),
        (["--method", "Auto:hops=1", "--stages", "2"], "auto has no setting 'hops'"),
        (["--optimizer", "sdg"], "Did you mean 'sgd'"),
        (["--averaging", "dasgd:every=4", "--replicas", "2"], "dasgd needs delay"),
        (["--stages", "99", "--method", "dsp"], "99 stages, but the model has"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--device", "gpu"], "device='gpu': give cpu, cuda or cuda:1"),
        (["--device", "mps"], "device='mps': PyTorch cannot use it here. Give --device cpu."),
        (["--device", "xla"], "device='xla': PyTorch cannot use it here. Give --device cpu."),
        (["--device", "meta"], "device='meta': it holds no numbers. Give --device cpu."),
        (["--seed", "9" * 23], f"seed={'9' * 23}: give a whole number of 64 bits"),
        (["--model", "mlp:hidden=32"], "network mlp: hidden=32: give whole numbers, as in (1,2)."),
        (["--model", "resnet20:channels=x"], "network resnet20: channels='x': give a whole number"),
        (["--model", "resnet20:classes=x"], "network resnet20: classes='x': give a whole number"),
        (["--model", "resnet20:name=x"], "name is no setting"),
        (["--model", "resnet20:data=x"], "unknown setting of network resnet20: 'data'"),
        (["--model", "wrn28-10:dropout=1.5"], "dropout=1.5: give a share from 0 to 1"),
        (["--data", "digits:test_share=x"], "data digits: test_share='x': give a number"),
        (["--data", "digits:seed=x"], "data digits: seed='x': give a whole number"),
        (["--data", "digits:folder=x"], "data digits: the folder is given by --data-folder"),
        (["--data", "enwik8:download=no"], "download='no': give true or false"),
        (["--engine", "streams", "--stages", "2"], "CUDA GPU (torch finds none here)"),
        (["--balance", "guess", "--stages", "2"], "unknown balance 'guess'"),
        (["--hybrid", "3"], "hybrid=3 of epochs=1"),
        (["--config", "/no/such.toml"], "/no/such.toml cannot be read"),
        (["--data", "cifar10:download=False", "--data-folder", "/no/such"], "cifar10"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert offbeat_says("train", *SHORT, "--out", str(out), *words) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert "Traceback" not in printed.err
    assert not (out / "summary.json").exists()


def test_no_setting_of_a_file_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("batch-size = 32\nbatch_size = 16\n")
    assert offbeat_says("train", "--config", str(file), "--out", str(tmp_path / "x")) == 2
    assert "batch_size is there twice" in capsys.readouterr().err
    for line in ('method = "dsp"', "stages = 2", "seed = 1", 'cuts = ["4"]', "ppv = [2]"):
        file.write_text(line)
        assert offbeat_says("study", "--config", str(file), "--out", str(tmp_path / "x")) == 2
        said = capsys.readouterr().err
        assert f"{line.split()[0]} in {file} is for one run, and a study makes several" in said
    assert not (tmp_path / "x").exists()


def test_rows_per_s_counts_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("offbeat.app.training.time.perf_counter", lambda: next(ticks))
    run = train(tmp_path / "run", "--batch-size", "1024")  # 1438 rows, in two batches
    assert run.summary["rows_per_s"] == 1438 / 2


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run")
    before = (run.folder / "model.safetensors").read_bytes()
    assert offbeat_says("train", *SHORT, "--out", str(run.folder)) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (run.folder / "model.safetensors").read_bytes() == before
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert offbeat_says("train", *SHORT, "--out", str(blocked / "run")) == 2
    assert "cannot be written to" in capsys.readouterr().err
    broken = tmp_path / "broken.toml"
    broken.write_text("epochs = \n")
    assert offbeat_says("train", "--config", str(broken), "--out", str(tmp_path / "x")) == 2
    assert "is not TOML" in capsys.readouterr().err
    broken.write_text("epoch = 3\n")
    assert offbeat_says("train", "--config", str(broken), "--out", str(tmp_path / "x")) == 2
    assert "Did you mean 'epochs'" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_ctrl_c_keeps_what_was_reached(tmp_path: Path, processes: int) -> None:
    out = tmp_path / "run"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if processes == 2 else []
    settings = ["--stages", "2", "--method", "dsp", "--lr", "0.02", "--out", str(out)]
    words = [*launch, "-m", "offbeat", "train", "--epochs", "10000", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or '"evaluation"' not in metrics.read_text():
        assert time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if processes == 1 else 1), errors.decode()
    assert b"stopping after this step" in errors
    run = Run.load(out)
    assert run.summary["status"] == "interrupted"
    assert run.metrics[-1]["status"] == "interrupted"
    assert load_weights(out / "model.safetensors")


_SIGNALLED_TWICE = """
import os, signal, sys
from pathlib import Path
from offbeat.app import training
from offbeat.app.experiment import Experiment

class Watcher:
    def now(self, what): ...
    def begin(self, trainer, progress): ...
    def evaluated(self, trainer, progress): ...
    def step(self, trainer, progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGINT)
    def end(self, status):  # the second one while the results are stored
        signal.raise_signal(signal.SIGINT)

settings = {"stages": "2", "method": "dsp", "epochs": "1000"}
summary = training.run_experiment(Experiment.read(settings), Path(sys.argv[1]), lambda: [Watcher()])
assert summary["status"] == "interrupted"
"""


def test_a_second_ctrl_c_while_results_are_stored_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [sys.executable, "-c", _SIGNALLED_TWICE, str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Ctrl-C twice more stops at once") == 1
    assert Run.load(out).summary["status"] == "interrupted"


# ------------------------------------------------------------------ studies and reports


def test_a_study_reuses_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["study", *SHORT, "--methods", "stale-weights", "--stage-counts", "2", "--seeds", "2"]
    assert offbeat_says(*words, "--out", str(tmp_path)) == 0
    first = capsys.readouterr().out
    assert "4/4 stale-weights-K2-seed1" in first
    assert "gap to BP" in first
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert offbeat_says(*words, "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out.count(": found") == 4
    runs = [Run.load(folder) for folder in sorted(tmp_path.iterdir()) if folder.is_dir()]
    stale, plain = sorted(cells_of(runs), key=lambda cell: -max(cell.lags))
    assert stale.lags == (2, 0)
    assert plain.gap == 0.0
    assert stale.gap == pytest.approx(stale.mean - plain.mean)
    assert offbeat_says(*words, "--out", str(tmp_path), "--batch-size", "32") == 2
    assert "was run with batch_size=64" in capsys.readouterr().err
    assert offbeat_says(*words, "--method", "adl") == 2
    assert (
        "--method is for one run, and a study makes several: leave it out and give"
        in capsys.readouterr().err
    )


def test_a_study_compares_corrections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = "pipedream pipedream + spike-compensation pipedream:accumulate=2+predict:horizon=lag"
    words = ["study", *SHORT, "--stage-counts", "2", "--seeds", "1", "--out", str(tmp_path)]
    assert offbeat_says(*words, "--methods", methods) == 0
    table = capsys.readouterr().out.partition("gap to\n")[2].split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in table[1:]] == [
        "synchronous",
        "pipedream",
        "pipedream+spike-compensation",
        "pipedream:accumulate=2+predict:horizon=lag",
    ]
    folder = tmp_path / "pipedream-accumulate2+predict-horizonlag-K2-seed0"
    assert Run.load(folder).config["correction"] == [
        {"name": "predict", "settings": {"horizon": "lag"}}
    ]
    alone = train(
        tmp_path / "alone", "--method", "pipedream", "--stages", "2",
        "--correction", "spike-compensation",
    )  # fmt: skip
    within = Run.load(tmp_path / "pipedream+spike-compensation-K2-seed0")
    assert within.summary["loss"] == alone.summary["loss"]
    # Corrections of all methods, in a folder of their own; plain training has none.
    assert offbeat_says(*words, "--methods", "pipedream", "--correction", "extrapolate") == 0
    said = capsys.readouterr().out
    assert "synchronous-K1-seed0: found" in said
    assert "2/2 pipedream+extrapolate-K2-seed0" in said


def test_a_study_is_told_by_a_file_and_flags_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        'methods = ["pipedream", "pipedream + extrapolate"]\nstage-counts = [2, 3]\nseeds = 2\n'
        "epochs = 1\nmax-steps = 2\n"
    )
    words = ["study", "--config", str(file), "--seeds", "1", "--out", str(tmp_path / "out")]
    assert offbeat_says(*words) == 0
    said = capsys.readouterr().out
    assert "5/5 pipedream+extrapolate-K3-seed0" in said
    file.write_text("stage-counts = []")
    assert offbeat_says(*words) == 2
    assert "--stage-counts: give at least one, as in --stage-counts 2,4." in capsys.readouterr().err


def test_a_study_refuses_what_it_cannot_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offbeat_says("study", "--methods", "synchronous+extrapolate") == 2
    assert "without lag a correction changes nothing. Leave it out." in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert offbeat_says("study") == 2
    assert "a study runs in one process, and torchrun has started 2" in capsys.readouterr().err


def test_a_short_run_is_probed_before_it_is_drained(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run", "--method", "pipedream:accumulate=2", "--stages", "2", "--monitor",
        "--max-steps", "12",
    )  # fmt: skip
    cosines = Readings.load(run.folder / "readings.jsonl").of("cosine", stage=0)
    assert len(cosines) == 1
    assert max(cosines.values()) < 0.999


def test_corrections_are_joined_by_a_plus_and_have_a_flag_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Experiment.read({"correction": "predict:horizon=lag + shrink:beta=1e+0"}).correction
    assert list(map(str, found)) == ["predict:horizon=lag", "shrink:beta=1.0"]
    assert offbeat_says("train", "--method", "pipedream:accumulate=6 + extrapolate") == 2
    said = capsys.readouterr().err
    assert "Give method pipedream:accumulate=6 and correction extrapolate." in said
    assert offbeat_says("train", "--correction", "spike", "--stages", "2") == 2
    assert "Did you mean 'spike-compensation'?" in capsys.readouterr().err
    assert offbeat_says("train", "--correction", "predict,shrink", "--stages", "2") == 2
    assert "'predict,shrink' names 2: give each by itself." in capsys.readouterr().err


def test_a_run_says_what_it_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--method", "dsp", "--stages", "2", "--epochs", "2", "--hybrid", "1")
    train(tmp_path / "hybrid", *words, "--max-steps", "25")
    said = capsys.readouterr().out
    assert "DSP for 23 updates, then Synchronous, 2 stages, lag 2 0: 2 epochs of 23 steps," in said
    assert "of which the first 25 are made" in said
    assert "epoch 1/2 and 2 steps: test loss" in said


def test_a_study_that_was_interrupted_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["study", *SHORT, "--methods", "dsp", "--stage-counts", "2", "--seeds", "2"]
    calls = iter([False] * 30 + [True])  # in the second of four runs
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "stop_together", lambda *_: next(calls, True))
        assert offbeat_says(*words, "--out", str(tmp_path)) == 130
    said = capsys.readouterr().out
    assert "2/4 dsp-K2-seed0: interrupted. 1 of 4 runs are finished; the same command" in said
    assert "dsp " not in said.partition("gap to BP")[2]  # no line for half a run
    assert offbeat_says(*words, "--out", str(tmp_path)) == 0
    assert capsys.readouterr().out.count(": found") == 1
    whole = train(tmp_path / "whole", "--method", "dsp", "--stages", "2", "--seed", "0")
    resumed = Run.load(tmp_path / "dsp-K2-seed0")
    assert resumed.summary["loss"] == whole.summary["loss"]


def test_settings_that_are_tuples_are_the_same_when_a_run_or_study_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "mlp:hidden=(32,(16))"]
    words = ["train", *SHORT, *model, "--method", "dsp:lag=(2,0),hop=(1,)", "--stages", "2"]
    words += ["--out", str(tmp_path / "run"), "--resume"]
    assert offbeat_says(*words) == 0
    assert offbeat_says(*words) == 0
    assert "is finished already" in capsys.readouterr().out
    other = [word.replace("32", "31") for word in words]
    assert offbeat_says(*other) == 2
    assert "was started with model=mlp:hidden=32,16" in capsys.readouterr().err
    words = ["study", *SHORT, *model, "--methods", "dsp:lag=(2,0)", "--stage-counts", "2"]
    words += ["--seeds", "1", "--out", str(tmp_path / "study")]
    assert offbeat_says(*words) == 0
    assert offbeat_says(*words) == 0
    assert capsys.readouterr().out.count(": found") == 2


def test_an_interrupted_run_with_tuples_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", "mlp:hidden=(32,32)", "--method", "dsp:lag=(2,0)", "--stages", "2"]
    words = ["train", *SHORT, *words, "--save-every", "5", "--out", str(tmp_path), "--resume"]
    with monkeypatch.context() as patch:
        calls = iter([False] * 10 + [True])
        patch.setattr(Trainer, "stop_together", lambda *_: next(calls, True))
        assert offbeat_says(*words) == 130
    assert offbeat_says(*words) == 0
    assert Run.load(tmp_path).summary["steps"] == 23


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "dsp foo"], "unknown method 'foo'"),
        (["--methods", "dsp", "--stage-counts", "2,40"], "give at most"),
        (["--methods", " "], "--methods: give at least one"),
    ],
)
def test_a_study_that_cannot_be_done_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert offbeat_says("study", *SHORT, *words, "--out", str(tmp_path / "study")) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "4"], "divide among 4 replicas, .* --drop-last leaves it out"),
        (["--method", "adl:accumulate=32", "--stages", "2"], "--drop-last leaves it out"),
        (["--resume"], ""),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    settings = [] if words == ["--resume"] else SHORT
    assert offbeat_says("train", *settings, *words, "--out", str(tmp_path / "run")) == 2
    assert re.search(said or "holds no run to go on with", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ["--replicas", "2", "--batch-size", "719"],
            b"divide among 2 replicas",
            marks=pytest.mark.long,
        ),
        (["--method", "adl:accumulate=32", "--stages", "2"], b"--drop-last leaves it out"),
    ],
)
def test_processes_refuse_a_batch_before_the_first_epoch(
    tmp_path: Path, words: list[str], said: bytes
) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "offbeat", "train"]
    out = tmp_path / "run"
    ended = subprocess.run(
        [sys.executable, *launch, *SHORT, *words, "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert not out.exists()


def test_a_file_of_somebody_else_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.pt").write_text("mine")
    assert offbeat_says("train", *SHORT, "--out", str(tmp_path)) == 2
    assert "holds model.pt, which is of no run" in capsys.readouterr().err
    assert (tmp_path / "model.pt").read_text() == "mine"


def test_going_on_from_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", "--resume")
    assert f"no run in {run.folder}: starting one" in capsys.readouterr().out
    (run.folder / "summary.json").unlink()
    assert offbeat_says("train", "--resume", "--out", str(run.folder)) == 0
    assert f"no checkpoint in {run.folder}: starting from step 0" in capsys.readouterr().out
    assert offbeat_says("timeline", "--measured", str(run.folder), "--width", "90") == 0
    assert re.search(r"stage 0 .*[FB]\d+[-=]", capsys.readouterr().out)


def test_a_run_that_diverged_says_so_and_so_does_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", "--stages", "4", "--method", "stale-weights", "--lr", "100")
    assert "training has diverged" in capsys.readouterr().err
    assert run.summary["memory"][0]["in_flight_bytes"] > 0  # as it was before the drain
    train(tmp_path / "bp")
    runs = runs_in(tmp_path)  # those of a folder, as of a study's
    text = page([Run.load(folder) for folder in runs])
    assert "run: the test loss is not a finite number: training has diverged." in text
    assert "run and bp differ in more than staleness: lr 100.0 (0.02)." in text


def test_a_report_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", "--method", "stale-weights", "--stages", "2")
    capsys.readouterr()
    assert offbeat_says("report", str(run.folder), "--out", str(tmp_path / "report")) == 0
    assert f"wrote {tmp_path / 'report' / 'report.html'}" in capsys.readouterr().out
    assert "stale-weights" in (tmp_path / "report" / "report.html").read_text()
    assert offbeat_says("report", str(tmp_path / "nothing")) == 2
    assert "is not a run" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys\nfrom offbeat.app.cli import main\ntry:\n main(['train', '--help'])\nexcept SystemExit:\n assert 'torch' not in sys.modules"  # noqa: E501
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


class LossOnAGpu:
    is_cuda = True

    def __init__(self, value: float, read: list[float]) -> None:
        self._value, self._read = value, read

    def __float__(self) -> float:
        self._read.append(self._value)
        return self._value


def test_losses_on_a_gpu_are_read_with_the_metrics_not_with_every_step() -> None:
    """Whoever reads one waits until the GPU has nothing left to do."""
    progress, read = Progress(1, 100), list[float]()
    for step in range(1, 24):
        progress.step = step
        progress.add(LossOnAGpu(float(step), read))  # type: ignore[arg-type]
        assert len(read) == step // 10 * 10
    assert progress.loss == 20
    progress.read_losses()  # as before a checkpoint
    assert progress.loss == 23
    assert progress.losses == read == list(range(1, 24))
    progress.add(torch.tensor(0.5))
    assert progress.loss == 0.5
