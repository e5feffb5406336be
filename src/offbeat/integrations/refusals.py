"""What Hugging Face's Trainer offers and stages cannot do, in words."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from offbeat.errors import ConfigurationError, unknown
from offbeat.methods import GPipe, Method, OneFOneB, Synchronous, method_named
from offbeat.methods.auto import Auto

OURS = (
    *("method", "stages", "cuts", "ppv", "balance", "corrections", "monitor", "guards"),
    *("replicas", "averaging", "seed", "engine", "compile", "timeout", "machines", "faults"),
)
"""The arguments of offbeat.Trainer that offbeat= may have."""
THEIRS = {
    "loss": "the model's, or compute_loss_func=",
    "weight": "what num_items_in_batch says",
    "optimizer": "args.optim, or optimizers=",
    "scheduler": "args.lr_scheduler_type, or optimizers=",
    "clip": "args.max_grad_norm",
    "autocast": "args.bf16",
    "penalty": "a part of the loss of your own",
    "when_replica_dies": "'stop'",
}


def checked_settings(offbeat: Any) -> dict[str, Any]:
    if not isinstance(offbeat, Mapping):
        raise ConfigurationError(
            f"offbeat={offbeat!r}: give a dict, as in offbeat=dict(method='pipedream', stages=4)."
        )
    for name in offbeat:
        if name in THEIRS:
            raise ConfigurationError(f"offbeat=dict({name}=...): here it is {THEIRS[name]}.")
        if name not in OURS:
            raise unknown("setting in offbeat=", name, OURS)
    return dict(offbeat)


def check_arguments(args: Any) -> None:
    """Refuses what would train otherwise than it says."""
    words = {
        "fp16": "float16 needs loss scaling, which no stale pipeline can share: take bf16=True",
        "deepspeed": "it places and steps weights itself: leave it out; stages place them here",
        "fsdp": "it shards weights itself: leave it out; every process holds stages here",
        "parallelism_config": "it divides layers and rows itself: leave it out",
        "auto_find_batch_size": "a batch that did not fit would be half in the pipe: give a size",
        "torch_compile": "stages are compiled one by one: say offbeat=dict(compile=True)",
        "bf16_full_eval": "it would cast the weights that train: leave it out",
        "fp16_full_eval": "it would cast the weights that train: leave it out",
    }
    for name, why in words.items():
        if getattr(args, name, None):
            raise ConfigurationError(f"{name}={getattr(args, name)!r}: {why}.")
    if args.n_gpu > 1:
        raise ConfigurationError(
            f"{args.n_gpu} GPUs of one process, which theirs would share by DataParallel: start a"
            " process per GPU with torchrun, or show this one only one (CUDA_VISIBLE_DEVICES=0)."
        )
    loaders = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(loaders, name, None):
            raise ConfigurationError(
                f"accelerator_config {name}=True: every process reads its replica's rows here, so"
                " leave it out."
            )


def check_class(kind: type, base: type, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise ConfigurationError(
                f"{kind.__name__}.{name} is overridden, and forward and backward of a batch happen"
                " in stages, at different times: what concerns the loss belongs into compute_loss,"
                " which is called where the loss is; all else into callbacks."
            )


def method_for(method: Any, parts: int) -> Method | Auto:
    """The method that takes as many parts as gradient_accumulation_steps says."""
    if isinstance(method, Auto) or (isinstance(method, str) and method.lower().strip() == "auto"):
        if parts > 1:
            raise ConfigurationError(
                f"method='auto' with gradient_accumulation_steps={parts}: it chooses the number of"
                " parts itself. Name a method, or set gradient_accumulation_steps=1."
            )
        return method if isinstance(method, Auto) else Auto()
    by_name = isinstance(method, str)
    found = method_named(method) if isinstance(method, str) else method
    if not isinstance(found, Method):
        raise ConfigurationError(f"method={method!r}: give an object of offbeat, or its name.")
    names = {each.name for each in fields(found)}
    if by_name and isinstance(found, GPipe | OneFOneB):
        return replace(found, micro_batches=parts)
    if parts == 1:
        return found
    if isinstance(found, Synchronous):
        return OneFOneB(micro_batches=parts)
    if "accumulate" in names and found.accumulate in (None, 1, parts):  # type: ignore[attr-defined]
        return replace(found, accumulate=parts)  # type: ignore[call-arg]
    if getattr(found, "micro_batches", None) == parts:
        return found
    raise ConfigurationError(
        f"gradient_accumulation_steps={parts} with {found}: parts of a batch are what this method"
        " accumulates over, so the two must be the same number. Leave its own out."
    )
