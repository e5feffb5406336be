"""Hugging Face's Trainer with stages: the numbers, files and verbs of theirs."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat.errors import ConfigurationError, MissingExtra

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from architectures import EVERY
from hugging_jobs import adapted, gpt, rows_of, run, same, sentences, story_of, trainer_of
from offbeat.integrations.transformers import Trainer

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
TEN = ("gpt2", "llama", "bert", "t5", "bart", "vit", "mistral", "opt", "falcon", "qwen2")


def test_the_example_is_two_lines_from_the_plain_script() -> None:
    plain, ours = (
        (EXAMPLES / name).read_text().splitlines()
        for name in ("hugging_face.py", "hugging_face_offbeat.py")
    )
    changes = [
        line
        for line in difflib.unified_diff(plain, ours, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert [line[0] for line in changes] == ["-", "+"] * 2
    assert len(plain) <= 36


@pytest.mark.parametrize("parts", [1, 2])
def test_without_lag_all_numbers_are_theirs(tmp_path: Path, parts: int) -> None:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": parts,
        "eval_strategy": "epoch",
        "settings": {"compute_metrics": lambda found: {"rows": len(found.predictions)}},
    }
    theirs = run(str(tmp_path), None, **settings)
    assert same(theirs, run(str(tmp_path), {"stages": 3}, **settings))


@pytest.mark.parametrize(
    "arguments",
    [
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"max_grad_norm": 0.05, "optim": "adafactor", "lr_scheduler_type": "cosine"},
        {"max_grad_norm": 0.0, "optim": "sgd", "weight_decay": 0.1},
    ],
)
def test_their_arguments_mean_what_they_mean_there(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    more: dict[str, Any] = {**arguments, "num_train_epochs": 1}
    theirs, ours = (run(str(tmp_path), how, **more) for how in (None, {"stages": 3}))
    if not arguments.get("max_grad_norm", 1.0):
        assert ours.pop("norms") == [] and theirs.pop("norms")  # nobody asks for them
    assert same(theirs, ours)


@pytest.mark.parametrize("name", TEN)
def test_architectures_give_the_losses_of_their_own_trainer(tmp_path: Path, name: str) -> None:
    architecture = EVERY[name]
    rows = rows_of(architecture)
    more: dict[str, Any] = {"rows": rows, "num_train_epochs": 1}
    stories = [run(str(tmp_path), how, architecture.make, **more) for how in (None, {"stages": 2})]
    assert len(stories[0]["loss"]) == 10
    assert same(*stories)


def test_losses_of_the_models_own_count_tokens(tmp_path: Path) -> None:
    """Labels of -100, uneven over the parts: num_items_in_batch goes along with them."""
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
    theirs = run(str(tmp_path), None, **more)
    assert same(theirs, run(str(tmp_path), {"stages": 2, "method": "gpipe"}, **more)) or (
        theirs["loss"]
        == pytest.approx(run(str(tmp_path), {"stages": 2, "method": "gpipe"}, **more)["loss"])
    )
    by_rows = run(str(tmp_path), {"stages": 2, "method": offbeat.OneFOneB(micro_batches=3)})
    plain = run(str(tmp_path), None)
    assert by_rows["loss"] == pytest.approx(plain["loss"], rel=2e-3)


def test_under_lag_the_log_has_the_mean_of_what_has_come(tmp_path: Path) -> None:
    trainer = trainer_of(gpt(), str(tmp_path), {"stages": 3, "method": "pipedream"}, max_steps=8)
    story = story_of(trainer)
    assert trainer.pipeline.lags == (2, 1, 0)
    assert story["step"] == 8 and len(story["rates"]) == 8
    ledger = trainer.pipeline.ledger
    assert [len(ledger.lags(stage)) for stage in range(3)] == [8, 8, 8]  # drained at the end
    losses = [float(torch.tensor(loss)) for loss in ledger.losses(2).values()]
    # Two steps fill the pipe and log no loss; the last line has the three that end it.
    assert len(story["loss"]) == 6
    assert story["loss"][:5] == pytest.approx(losses[:5], rel=1e-6)
    assert story["loss"][5] == pytest.approx(sum(losses[5:]) / 3, rel=1e-6)
    assert story["mean"] == pytest.approx(sum(losses) / 8, rel=1e-6)


def test_evaluation_and_checkpoints_drain(tmp_path: Path) -> None:
    how = {"stages": 3, "method": "stale-weights"}
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "max_steps": 6}
    trainer = trainer_of(gpt(), str(tmp_path), how, **more)
    seen: list[list[int]] = []
    evaluate = trainer.evaluation_loop

    def look(*arguments: Any, **settings: Any) -> Any:
        ledger = trainer.pipeline.own_ledger
        seen.append([sum(1 for _ in ledger.lags(stage)) for stage in range(3)])
        return evaluate(*arguments, **settings)

    trainer.evaluation_loop = look
    story_of(trainer)
    assert seen[0] == [4, 4, 4]


@pytest.mark.parametrize("build", [gpt, adapted])
def test_a_run_that_is_taken_up_again_ends_with_the_same_bits(tmp_path: Path, build: Any) -> None:
    how = {"stages": 3, "method": "pipedream"}
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 8, "save_total_limit": 1}
    whole = run(str(tmp_path / "whole"), how, build, **{**more, "save_total_limit": None})
    again = run(
        str(tmp_path / "again"), how, build, str(tmp_path / "whole" / "checkpoint-8"), **more
    )
    assert whole.pop("mean") != again.pop("mean")  # theirs, too, is that of the steps of one call
    assert same(whole, again)


def test_a_checkpoint_that_was_not_finished_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 12}
    whole = run(str(tmp_path), {"stages": 2}, **more)
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()
    again = run(str(tmp_path), {"stages": 2}, gpt, True, **more)
    assert whole.pop("mean") != again.pop("mean")
    assert same(whole, again)
    (tmp_path / "checkpoint-4").mkdir(exist_ok=True)
    with pytest.raises(ConfigurationError, match="was not finished"):
        run(str(tmp_path / "none"), {"stages": 2}, gpt, str(tmp_path), **more)


@pytest.mark.parametrize("build", [gpt, adapted])
def test_the_folder_loads_and_the_model_generates(tmp_path: Path, build: Any) -> None:
    trainer = trainer_of(build(), str(tmp_path), {"stages": 3, "method": "pipedream"}, max_steps=3)
    trainer.train()
    trainer.save_model()
    prompt = torch.tensor([[5, 6, 7]])
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    written = trainer.model.generate(input_ids=prompt, **how)
    if build is gpt:
        import transformers

        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    else:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(gpt(), tmp_path)
    assert torch.equal(loaded.eval().generate(input_ids=prompt, **how), written)


def test_two_processes_tell_the_same_story(tmp_path: Path) -> None:
    how, more = {"stages": 3, "method": "pipedream"}, {"max_steps": 5, "eval_strategy": "epoch"}
    alone = run(str(tmp_path), how, adapted, **more)
    job = partial(run, str(tmp_path), how, adapted, **more)
    assert all(same(alone, story) for story in offbeat.launch(job, 2))


@pytest.mark.long
@pytest.mark.timeout(240)
def test_processes_tell_the_same_story(tmp_path: Path) -> None:
    how: dict[str, Any] = {"stages": 3, "method": "pipedream"}
    more: dict[str, Any] = {
        "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 8, "max_steps": 12
    }  # fmt: skip
    alone = run(str(tmp_path / "one"), how, **more)
    job = partial(run, str(tmp_path / "two"), how, **more)
    assert all(same(alone, story) for story in offbeat.launch(job, 2))
    resume = partial(run, str(tmp_path / "three"), how, adapted, None, **more)
    adapters = run(str(tmp_path / "four"), how, adapted, **more)
    assert all(same(adapters, story) for story in offbeat.launch(resume, 3))
    taken_up = partial(
        run, str(tmp_path / "two"), how, gpt, str(tmp_path / "two" / "checkpoint-8"), **more
    )
    del alone["mean"]  # theirs, too, is that of the steps of one call
    for story in offbeat.launch(taken_up, 3):
        del story["mean"]
        assert same(alone, story)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_rows_go_to_replicas(tmp_path: Path) -> None:
    """Steps, schedules and rows count replicas, whether they are processes or not."""
    how: dict[str, Any] = {"stages": 2, "replicas": 2, "method": "pipedream"}
    more: dict[str, Any] = {"rows": sentences(20), "eval_strategy": "epoch"}
    alone = run(str(tmp_path), how, **more)
    assert alone["step"] == 10  # two epochs of 20 rows, two rows for each of two replicas
    for processes in (2, 4):
        for story in offbeat.launch(partial(run, str(tmp_path), how, **more), processes):
            assert story["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert story["mean"] == pytest.approx(alone["mean"], rel=1e-6)
            names = alone["weights"]
            assert all(torch.equal(story["weights"][name], names[name]) for name in names)


def test_training_twice_goes_on_with_new_optimizers(tmp_path: Path) -> None:
    trainer = trainer_of(gpt(), str(tmp_path), {"stages": 2}, max_steps=3, optim="sgd")
    first, second = (story_of(trainer)["weights"] for _ in range(2))
    assert all(not torch.equal(first[name], second[name]) for name in first)
    again = gpt()
    again.load_state_dict(first)
    assert same_weights(
        story_of(trainer_of(again, str(tmp_path), {"stages": 2}, max_steps=3, optim="sgd"))[
            "weights"
        ],
        second,
    )


def same_weights(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


class Custom(Trainer):
    def training_step(self, *arguments: Any, **settings: Any) -> Any:
        return super().training_step(*arguments, **settings)


class Weighted(Trainer):
    """A loss of one's own, as in their documentation."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = 2 * nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def test_a_loss_of_ones_own_is_computed_where_the_loss_is(tmp_path: Path) -> None:
    import transformers

    theirs = type("Theirs", (transformers.Trainer,), {"compute_loss": Weighted.compute_loss})
    more: dict[str, Any] = {"num_train_epochs": 1, "eval_strategy": "epoch"}
    plain = run(str(tmp_path), None, kind=theirs, **more)
    assert same(plain, run(str(tmp_path), {"stages": 3}, kind=Weighted, **more))


@pytest.mark.parametrize(
    ("arguments", "how", "words"),
    [
        ({"fp16": True}, {}, "fp16=True: float16 needs loss scaling"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size=True"),
        ({"torch_compile": True}, {}, r"offbeat=dict\(compile=True\)"),
        ({"optim": "lomo"}, {"stages": 2}, "lomo|LOMO"),
        ({}, {"clip": 1.0}, "here it is args.max_grad_norm"),
        ({}, {"stage": 2}, "Did you mean 'stages'"),
        ({"gradient_accumulation_steps": 2}, {"method": "auto"}, "chooses the number of parts"),
        (
            {"gradient_accumulation_steps": 2},
            {"method": offbeat.ADL(accumulate=4)},
            "must be the same number",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
         {"stages": 2}, "goes by a metric"),
        ({"accelerator_config": {"split_batches": True}}, {}, "split_batches=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(
    tmp_path: Path, arguments: dict[str, Any], how: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigurationError, ImportError), match=words):
        trainer_of(gpt(), str(tmp_path), how, **arguments).train()


def test_a_custom_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Custom.training_step is overridden"):
        trainer_of(gpt(), str(tmp_path), {}, kind=Custom)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name in [n for n in sys.modules if n.startswith("offbeat.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=r"pip install 'transformers>=5\.0' 'accelerate>=1\.15'"):
        importlib.import_module("offbeat.integrations.transformers")


def start(folder: Path, processes: int, *words: str) -> subprocess.Popen[str]:
    """The example, as a user starts it."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [*command, str(EXAMPLES / "hugging_face_offbeat.py"), str(folder), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def told_by(folder: Path, process: subprocess.Popen[str]) -> tuple[list[float], bytes]:
    """The losses of its log and the weights it has saved, once it has ended."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    state = json.loads((folder / "checkpoint-32" / "trainer_state.json").read_text())
    losses = [line["loss"] for line in state["log_history"] if "loss" in line]
    (weights,) = folder.glob("*model.safetensors")
    return losses, weights.read_bytes()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [(), ("adapters",)])
def test_the_example_runs_anywhere_and_survives_a_kill(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    alone = told_by(tmp_path / "1", start(tmp_path / "1", 1, *words))
    assert len(alone[0]) == 8
    for processes in (2, 3):
        folder = tmp_path / f"{processes}"
        assert told_by(folder, start(folder, processes, *words)) == alone
    folder = tmp_path / "killed"
    process = start(folder, 2, *words)
    deadline = time.monotonic() + 200
    while not (folder / "checkpoint-12" / "trainer_state.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert told_by(folder, start(folder, 3, *words)) == alone
