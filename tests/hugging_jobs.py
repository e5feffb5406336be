"""Runs of Hugging Face's Trainer, theirs and ours, as scripts make them; one call per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from architectures import GPT, Architecture, hugging
from offbeat.integrations.transformers import Trainer

transformers.logging.set_verbosity_error()
Rows = list[dict[str, Any]]


def sentences(count: int = 21, length: int = 8) -> Rows:
    """Rows of tokens, of which some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    rows: Rows = []
    for number in range(count):
        ids = torch.randint(3, 32, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 4] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def gpt(**also: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hugging("GPT2LMHeadModel", "GPT2Config", **{**GPT, **also})()


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(gpt(), settings)  # type: ignore[no-any-return]


def trainer_of(
    model: nn.Module,
    folder: str,
    offbeat: dict[str, Any] | None,
    *,
    rows: Rows | None = None,
    settings: dict[str, Any] | None = None,
    kind: type[Any] | None = None,
    **arguments: Any,
) -> Any:
    """Theirs where ``offbeat`` is None."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 3,
        **arguments,
    }
    args = transformers.TrainingArguments(
        folder, report_to=[], use_cpu=True, disable_tqdm=True, **usual
    )
    rows = sentences() if rows is None else rows
    kind = kind or (transformers.Trainer if offbeat is None else Trainer)
    more = {} if offbeat is None else {"offbeat": offbeat}
    return kind(model, args, train_dataset=rows, eval_dataset=rows[:5], **(settings or {}), **more)


def story_of(trainer: Any, resume: Any = None) -> dict[str, Any]:
    """Trains; all that a user sees of it."""
    output = trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return {
        "loss": [line["loss"] for line in history if "loss" in line],
        "evaluated": [line["eval_loss"] for line in history if "eval_loss" in line],
        "rates": [line["learning_rate"] for line in history if "learning_rate" in line],
        "norms": [line["grad_norm"] for line in history if "grad_norm" in line],
        "mean": output.training_loss,
        "step": trainer.state.global_step,
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    ours, theirs = one["weights"], other["weights"]
    return (
        all(one[name] == other[name] for name in one if name != "weights")
        and list(ours) == list(theirs)
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


def run(
    folder: str,
    offbeat: dict[str, Any] | None,
    build: Callable[[], nn.Module] = gpt,
    resume: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """In every process of a launch, or alone."""
    return story_of(trainer_of(build(), folder, offbeat, **more), resume)


def rows_of(architecture: Architecture) -> Rows:
    """The rows of an architecture's batches, with their targets as labels of the model's own."""
    rows: Rows = []
    for x, y in architecture.batches():
        for number in range(len(y)):
            row = {name: value[number] for name, value in x.items()}
            rows.append({**row, "labels": y[number]})
    return rows
