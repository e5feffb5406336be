"""Hugging Face's Trainer with the model in stages: the loop is theirs, the steps are offbeat's.

Their loop asks for a batch, a step, a log, an evaluation, a checkpoint; this file says what each
of them is where stages do not wait for each other. See docs/hugging-face.md.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import ConfigurationError, MissingExtra
from offbeat.integrations.batches import parts_of
from offbeat.integrations.recipes import (
    check_optimizer,
    check_scheduler,
    optimizers_like,
    schedulers_like,
    take_weights,
)
from offbeat.integrations.refusals import (
    check_arguments,
    check_class,
    checked_settings,
    method_for,
)
from offbeat.integrations.stand_ins import Answer, Call, Output, Question, StandIn
from offbeat.nest import Nest
from offbeat.records import disk
from offbeat.trainer import Trainer as Pipeline

try:
    import transformers
    from accelerate.utils import convert_to_fp32
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import get_last_checkpoint

    from offbeat.integrations.rows import Accelerator, Rows, State
except ImportError as error:
    raise MissingExtra(
        f"offbeat.integrations.transformers needs transformers and accelerate ({error}): install"
        " them with pip install 'transformers>=5.0' 'accelerate>=1.15'."
    ) from error

log = logging.getLogger("offbeat")

STATE = "offbeat"
"""The folder, in a checkpoint of theirs, with what stages have beside weights."""
FACTS = "offbeat.json"
"""Beside it: where stages begin, and losses that belong to the next line of the log."""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Theirs with one argument more: ``offbeat=dict(method=..., stages=...)``.

    Of its keys most are those of :class:`offbeat.Trainer`; what theirs has words for keeps them:
    loss, optimizer, schedule, clipping, precision and parts come from ``args``.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        offbeat: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._settings = checked_settings({} if offbeat is None else offbeat)
        check_class(type(self), Trainer, ("training_step",))
        args = transformers.TrainingArguments("tmp_trainer") if args is None else copy(args)
        check_arguments(args)
        own = args.distributed_state
        self._method = method_for(
            self._settings.get("method", "synchronous"), args.gradient_accumulation_steps
        )
        self._rows = Rows(own.num_processes, own.process_index, self._settings.get("replicas", 1))
        self._own_state = own
        args.distributed_state = State(own, self._rows)
        self.pipeline: Pipeline | None = None
        """The trainer of the stages; there is one from the beginning of :meth:`train` on."""
        self.forward_in_stages: Any = None
        """While something is evaluated: from the model's arguments to its output."""
        self._parts: list[tuple[dict[str, Any], Any]] = []
        self._updates = self._due = 0
        """Since the last line of the log: updates begun, and losses that have come."""
        self._late: list[Tensor] = []
        """Losses that a drain has brought, for the next line."""
        self._give_back: Callable[[], None] | None = None
        self._is_whole = True
        self._resumed_from: Path | None = None
        super().__init__(model, args, *others, **settings)
        if self._rows.replicas > 1 and not args.average_tokens_across_devices:
            raise ConfigurationError(
                "average_tokens_across_devices=False: labels are counted over all replicas here, so"
                " that it does not matter which process has which. Leave it out."
            )
        if self._rows.replicas > 1 and args.train_sampling_strategy == "batch_rebalance":
            raise ConfigurationError(
                "train_sampling_strategy='batch_rebalance' divides rows among processes itself, and"
                " replicas may be several processes each: take 'random' or 'group_by_length'."
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"accelerate was configured with {name[3:-8]}, which places weights itself:"
                    " start the script with torchrun, or accelerate launch without it."
                )
        self.accelerator.__class__ = Accelerator
        self.accelerator.rows = self._rows
        self.accelerator.dataloader_config.dispatch_batches = False

    # ---------------------------------------------------------------- beginning

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:  # noqa: ARG002
        return _Pipelined(self)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if optimizer is None or optimizer is self.optimizer:
            self._begin()
        return scheduler

    def _begin(self) -> None:
        """Makes the trainer of the stages from what theirs has made of the arguments."""
        check_optimizer(self.optimizer)
        check_scheduler(self.lr_scheduler)
        settings = {"seed": self.args.seed, **self._settings, "method": self._method}
        stored = self._facts(self._resumed_from)
        cuts = stored.get("cuts")
        if cuts is not None and len(cuts) + 1 == settings.get("stages"):
            settings["cuts"] = cuts  # of the first batch of all, not of the next one
        if self.args.max_grad_norm and self.args.max_grad_norm > 0:
            settings["clip"] = self.args.max_grad_norm
        make_optimizer = optimizers_like(self.optimizer, self.model)
        self._give_back = take_weights(self.optimizer)  # stages step their own
        self.model.train()
        self.pipeline = Pipeline(
            self.model,
            loss=self._loss,
            weight="sum",
            optimizer=make_optimizer,
            scheduler=schedulers_like(self.lr_scheduler, self.optimizer),
            autocast=torch.bfloat16 if self.args.bf16 else None,
            **settings,
        )
        self._count = _parts_per_update(self.pipeline)
        self._updates = self._due = 0
        self._late = [torch.tensor(loss) for loss in stored.get("late", ())]
        self.accelerator.norm_of = lambda: self.pipeline and self.pipeline.gradient_norm

    def _facts(self, folder: Path | None) -> dict[str, Any]:
        known = folder is not None and (folder / FACTS).exists()
        return json.loads((folder / FACTS).read_text()) if folder and known else {}

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *others: Any, **settings: Any
    ) -> Any:
        if trial is not None:
            raise ConfigurationError(
                "a search over hyperparameters changes the model under the stages: start a run per"
                " trial."
            )
        if self._give_back is not None:  # this is not the first time
            self._give_back()
        self.pipeline = None
        resume_from_checkpoint = finished(resume_from_checkpoint, self.args.output_dir)
        try:
            output = super().train(resume_from_checkpoint, trial, *others, **settings)
        finally:
            self._resumed_from = None
        self._gather()
        loss = torch.tensor([output.training_loss], dtype=torch.float64)
        return output._replace(training_loss=float(self._rows.gather(loss).mean()))

    # ---------------------------------------------------------------- a step

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *others: Any, **settings: Any
    ) -> Any:
        if settings.get("is_training"):
            batch_size *= self._rows.replicas_here
        return super()._get_dataloader(dataset, description, batch_size, *others, **settings)

    def get_batch_samples(self, *arguments: Any) -> Any:
        self._parts = []  # what an epoch that was broken off has left
        return super().get_batch_samples(*arguments)

    def training_step(
        self,
        model: Any,  # noqa: ARG002 -- it runs in stages
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Keeps a part until its batch is complete, and then gives that to the stages.

        Returns the losses that have become due, zero if there are none.
        """
        assert self.pipeline is not None
        self._parts.append((self._prepare_inputs(inputs), num_items_in_batch))
        losses = []
        if len(self._parts) == self.current_gradient_accumulation_steps:
            parts, self._parts = self._parts, []
            if not self.model.training:
                self.model.train()
            x, y = parts_of(
                parts,
                self._arguments,
                self._rows.replicas_here,
                self._count,
                accumulates=self.args.gradient_accumulation_steps > 1,
            )
            self._is_whole = False
            loss = self.pipeline.step(x, y)
            losses, self._late = [*self._late, *([] if loss is None else [loss])], []
            self._updates += 1
            if self.state.global_step + 1 >= self.state.max_steps:
                losses += self.pipeline.flush()
            self._due += len(losses)
        total = torch.zeros((), device=self.args.device)
        for loss in losses:
            total = total + loss.detach().to(total)
        return total

    def _arguments(self, inputs: dict[str, Any], num_items_in_batch: Any) -> dict[str, Any]:
        """What the computation of the loss calls the model with."""
        try:
            self.compute_loss(
                Question(self.model), dict(inputs), num_items_in_batch=num_items_in_batch
            )
        except Call as call:
            return {name: value for name, value in call.inputs.items() if value is not None}
        raise ConfigurationError(
            f"{type(self).__name__}.compute_loss did not call the model it was given: the loss has"
            " to be computed from model(**inputs), whose forward runs in stages."
        )

    def _loss(self, output: Any, y: Any) -> Tensor:
        """Where the last stage is: theirs, of an output that is there already."""
        device = self.model.device.type if hasattr(self.model, "device") else self.args.device.type
        with torch.autocast(device, enabled=False) if self.args.bf16 else nullcontext():
            if self.args.bf16:
                output = convert_to_fp32(output)
            found = self.compute_loss(
                Answer(self.model, output),
                dict(y["inputs"]),
                num_items_in_batch=y["num_items_in_batch"],
            )
            loss: Tensor = found[0] if isinstance(found, tuple) else found
            own = getattr(self, "loss_is_scaled_for_ga", None)
            if own is None:
                counted = self.model_accepts_loss_kwargs and y["num_items_in_batch"] is not None
                own = counted or self.compute_loss_func is not None
            counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
            if counted and y["num_items_in_batch"] is not None and self._rows.replicas_here > 1:
                loss = loss * self._rows.replicas_here  # as theirs does for processes
            if not own:
                loss = loss / y["parts"]
                loss = loss if y["share"] == 1.0 else loss * y["share"]
            return loss if y["counts"] else loss * 0.0

    # ---------------------------------------------------------------- logging

    def log(self, logs: dict[str, float], *others: Any) -> None:
        """The mean of the losses that have come since the last line, which lag may make fewer."""
        if "loss" in logs:
            if not self._due:
                del logs["loss"]
            elif self._due != self._updates:
                logs["loss"] *= self._updates / self._due
            self._due = self._updates = 0
        if self._rows.count > 1:
            for name in ("loss", "train_loss"):
                if name in logs:
                    value = torch.tensor([logs[name]], dtype=torch.float64)
                    logs[name] = float(self._rows.gather(value).mean())
        super().log(logs, *others)

    # ---------------------------------------------------------------- evaluating

    def _drain(self) -> None:
        """Lets every stage apply all batches that were begun."""
        if self.pipeline is not None:
            self._late += self.pipeline.flush()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """All processes read all rows, and each forward runs through the stages."""
        state = self.args.distributed_state
        count = state.num_processes
        self._drain()
        with self.accelerator.reading_all():
            state.num_processes = 1
            try:
                if self.pipeline is None:
                    yield
                else:
                    with self.pipeline.predictor() as self.forward_in_stages:
                        yield
            finally:
                state.num_processes, self.forward_in_stages = count, None

    def evaluate(self, *arguments: Any, **settings: Any) -> Any:
        if self.forward_in_stages is not None:  # of several sets one after the other
            return super().evaluate(*arguments, **settings)
        with self._evaluating():
            return super().evaluate(*arguments, **settings)

    def predict(self, *arguments: Any, **settings: Any) -> Any:
        with self._evaluating():
            return super().predict(*arguments, **settings)

    # ---------------------------------------------------------------- saving

    def _gather(self) -> None:
        """Makes the model of every process whole until the next step."""
        if self.pipeline is not None and not self._is_whole:
            self._drain()
            self.pipeline.gather()
            self._is_whole = True

    def _save_checkpoint(self, *arguments: Any) -> None:
        self._gather()
        super()._save_checkpoint(*arguments)

    def save_model(self, *arguments: Any, **settings: Any) -> None:
        self._gather()
        ours, self.args.distributed_state = self.args.distributed_state, self._own_state
        try:
            super().save_model(*arguments, **settings)
        finally:
            self.args.distributed_state = ours

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.pipeline is not None
        # Beside the checkpoints, which theirs may delete: the ledger of a long run is there, too.
        beside = Path(output_dir).parent / f".{STATE}"
        written = self.pipeline.save(beside, drain=True, wait=True)
        self._is_whole = False  # a drain hides what other processes train
        if self.args.should_save:
            folder = Path(output_dir) / STATE
            shutil.rmtree(folder, ignore_errors=True)  # of a run that did not get further
            folder.mkdir(parents=True)
            written.rename(folder / written.name)
            facts = {"cuts": self.pipeline.cuts, "late": [float(loss) for loss in self._late]}
            disk.write(Path(output_dir) / FACTS, [json.dumps(facts).encode()])
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # it is the same in all processes
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not (folder / STATE).is_dir():
            raise ConfigurationError(
                f"{folder} has no folder {STATE!r}: it was saved by another Trainer, or with"
                " save_only_model=True, and what stages have beside weights is not there. Start"
                " from its weights: from_pretrained(...)."
            )
        self._resumed_from = folder
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.pipeline is None:
            return
        self.pipeline.resume(Path(checkpoint) / STATE)
        known = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(known)

    def _load_best_model(self) -> None:
        self._gather()
        super()._load_best_model()
        if self.pipeline is not None:
            self.pipeline.load_state_dict(self.model.state_dict())


def finished(checkpoint: Any, folder: str) -> Any:
    """The checkpoint to go on from: one that was being written at the end of a run is none."""
    if checkpoint is True:
        checkpoint = get_last_checkpoint(folder)
    if not checkpoint or (Path(checkpoint) / TRAINER_STATE_NAME).exists():
        return checkpoint
    newest = Path(checkpoint)
    others = (path for path in newest.parent.glob("checkpoint-*") if path != newest)
    numbers = {path: path.name.rpartition("-")[2] for path in others}
    whole = [p for p, n in numbers.items() if n.isdigit() and (p / TRAINER_STATE_NAME).exists()]
    if not whole or not newest.name.startswith("checkpoint-"):
        raise ConfigurationError(
            f"{newest} is no checkpoint, or was not finished (it has no {TRAINER_STATE_NAME}), and"
            " there is none beside it: start anew, in another folder."
        )
    found = max(whole, key=lambda path: int(numbers[path]))
    log.warning("%s was not finished (no %s): going on from %s.", newest, TRAINER_STATE_NAME, found)
    return str(found)


class _Pipelined(StandIn):
    """The model whose forward runs in stages, wherever they are."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.model)
        self._trainer = trainer

    def forward(self, inputs: dict[str, Nest]) -> Any:
        trainer = self._trainer
        if trainer.forward_in_stages is not None:
            output = trainer.forward_in_stages(inputs)
        else:
            bf16, device = trainer.args.bf16, trainer.args.device.type
            with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
                output = _in_evaluation(trainer.model, inputs)
        if trainer.args.bf16:
            output = convert_to_fp32(output)
        return Output(output) if isinstance(output, dict) else output


def _in_evaluation(model: nn.Module, inputs: dict[str, Nest]) -> Any:
    before = model.training
    try:
        return model.eval()(**inputs)
    finally:
        model.train(before)


def _parts_per_update(pipeline: Pipeline) -> int:
    counts = {m.schedule(pipeline.stages).micro_batches for m, _ in pipeline.phases}
    if len(counts) > 1:
        raise ConfigurationError(
            f"{pipeline.phases}: these phases make {sorted(counts)} parts of a batch, and theirs"
            " makes one number of them for the whole run. Give all phases the same."
        )
    return counts.pop()
