"""Models as people bring them: in wrappers, in evaluation mode, with batches of too many keys."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from offbeat.cutting.cut import Cut, Cuts, Model
from offbeat.cutting.ways import plan_cut
from offbeat.errors import BatchError, ConfigurationError
from offbeat.nest import Nest
from offbeat.stages.trial import arguments_of, is_spread

log = logging.getLogger("offbeat")

_OF_LOSSES = {"num_items_in_batch"}
"""What Hugging Face's models hand on to their loss."""
_SENDERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def plan(model: Model, *, stages: int | None, cuts: Cuts | None, ppv: Sequence[int] | None) -> Cut:
    """The cut of the model inside its wrappers, as far as it is known without data."""
    model = unwrapped(model)
    return plan_cut(model, stages=stages, cuts=found_in(model, cuts), ppv=ppv)


def unwrapped(model: Model) -> Model:
    """The model in what torch.compile made of it; a wrapper that sends gradients is refused."""
    if not isinstance(model, nn.Module):
        return model
    kinds = {kind.__name__ for kind in type(model).__mro__}
    sender = next((name for name in _SENDERS if name in kinds), None)
    if sender is not None:
        raise ConfigurationError(
            f"the model is wrapped in {sender}, which would average gradients on its own: give the"
            " model inside, model.module; copies that train together are Trainer(replicas=...)."
        )
    inner = getattr(model, "_orig_mod", None)
    if "OptimizedModule" in kinds and isinstance(inner, nn.Module):
        log.info("torch.compile(model) is taken as the model inside: stages are compiled one by")
        log.info("one, with Trainer(compile=True).")
        return unwrapped(inner)
    return model


def found_in(model: Model, cuts: Cuts | None) -> Cuts | None:
    """The cuts, by the paths that blocks have inside wrappers such as those of peft."""
    if not isinstance(model, nn.Module) or not isinstance(cuts, Sequence) or isinstance(cuts, str):
        return cuts
    paths = [name for name, _ in model.named_modules()]
    found: list[Any] = []
    for cut in cuts:
        ends = [path for path in paths if isinstance(cut, str) and path.endswith(f".{cut}")]
        found.append(ends[0] if cut not in paths and len(ends) == 1 else cut)
    return found


def refuse_sync_batch_norm(model: nn.Module) -> None:
    """Where processes run different stages."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{name!r} is a SyncBatchNorm, which would wait for the statistics of processes"
                " that run other stages: give an nn.BatchNorm; replicas average its statistics as"
                " their averaging says (statistics=)."
            )


def check_keys(model: nn.Module, x: Mapping[str, Any]) -> None:
    """Names the keys of a batch that a model has no arguments for."""
    names, takes_others = arguments_of(model)
    unknown = [str(name) for name in x if name not in names]
    of_hugging_face = hasattr(model, "main_input_name")  # it takes no dict as one argument
    mixed = 0 < len(unknown) < len(x)
    if unknown and not is_spread(x, names, takes_others) and (mixed or of_hugging_face):
        raise BatchError(
            f"{type(model).__name__} has no argument {', '.join(map(repr, unknown))}, which the"
            f" batch has. It takes {', '.join(sorted(names))}. Leave out the others, for example"
            " where the batch is collated. The batch was not started."
        )


def look_at_first(model: nn.Module, x: Nest) -> None:
    """Says what may be meant otherwise, once, before the first step."""
    parts = [module for module in model.modules() if not any(True for _ in module.children())]
    if parts and not any(module.training for module in parts):
        log.warning(
            "this %s is in evaluation mode, as from_pretrained() leaves it: dropout is off, and"
            " BatchNorm learns no statistics. Call model.train() before the first step.",
            type(model).__name__,
        )
    if not isinstance(x, Mapping):
        return
    names, takes_others = arguments_of(model)
    unknown = [str(name) for name in x if name not in names and name not in _OF_LOSSES]
    if unknown and takes_others and len(unknown) < len(x):
        log.warning(
            "%s has no argument %s; it takes any (**kwargs) and may ignore it.",
            type(model).__name__,
            ", ".join(map(repr, unknown)),
        )
    config = getattr(model, "config", None)
    if "use_cache" in names and (x.get("use_cache") or getattr(config, "use_cache", False)):
        log.info("use_cache is off while stages train and are evaluated: nothing is generated.")
