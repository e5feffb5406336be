"""Whether a cut computes what the whole model does: outputs, gradients and buffers compared.

At the model's own weights first, since what a layer begins with its first batch must begin there,
then at random ones, behind which nothing can hide.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offbeat import nest
from offbeat.cutting.sharing import Sharing, share
from offbeat.errors import ConfigurationError, OffbeatError, StageError
from offbeat.nest import Nest
from offbeat.stages.trial import Whole, leave_untouched, outputs_of, same_values, switch_mode

Loan = Callable[[], AbstractContextManager[None]]
"""Lends a model random weights, or nothing where it does not run on them."""


def compare_with_whole(
    model: nn.Module,
    stages: Sequence[nn.Module],
    batch: Nest,
    name: str,
    lend: Loan,
    *,
    recorded: bool = False,
) -> None:
    """Refuses stages that do not compute what the whole model does, and remember it alike.

    ``recorded``: they run other code than the model's own, which may know a gradient of its own.
    """
    stages = share(model, stages)
    Sharing.among(model, stages).refuse_written_buffers(batch)
    compare = partial(_compare_in_mode, model, stages, batch, name)
    for training in (True, False):
        compare(training, gradients=False)
    with lend():  # zeros at the start hide what is used
        for training in (True, False):
            compare(training, gradients=training, must=recorded)


def compare_record(model: nn.Module, stages: Sequence[nn.Module], batch: Nest, name: str) -> None:
    """The same for a record made in the midst of training: in one mode, at the model's weights."""
    training = model.training
    _compare_in_mode(model, stages, batch, name, training, gradients=training, must=True)


def _compare_in_mode(
    model: nn.Module,
    stages: Sequence[nn.Module],
    batch: Nest,
    name: str,
    training: bool,
    *,
    gradients: bool,
    must: bool = False,
) -> None:
    kind = type(model).__name__
    with switch_mode(model, training=training):
        whole = outputs_of([Whole(model)], batch)[-1]
        with explain_failure(model, name):
            cut = _output_of(model, stages, batch)
        if not same_values(cut, whole):
            raise ConfigurationError(
                f"cut at {name}, this {kind} computes something else than in one piece"
                f" {'in training' if training else 'in evaluation'}. {_reason(model, _UNSEEN)}"
            )
        if gradients:
            _refuse_other_gradients(model, stages, batch, name, must)
        before, after = (_buffers_after(model, part, batch) for part in ([Whole(model)], stages))
        for key in before:
            if not same_values(after.get(key), before[key]):
                raise ConfigurationError(
                    f"cut at {name}, buffer {key!r} of this {kind} holds something else after a"
                    f" forward than in one piece. {_UNSEEN}"
                )


def _buffers_after(
    model: nn.Module, modules: Sequence[nn.Module], batch: Nest
) -> dict[str, Tensor]:
    value = nest.replace(batch, lambda t: t.clone())
    with leave_untouched([model, *modules]):
        for module in modules:
            value = nest.replace(module(value), lambda t: t.clone())  # it may hand on a buffer
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _output_of(model: nn.Module, stages: Sequence[nn.Module], batch: Nest) -> Nest:
    """What the last stage returns when each has its own weights alone, as in processes."""
    value = nest.replace(batch, lambda t: t.clone())
    with leave_untouched(stages):
        for stage in stages:
            own = {id(parameter) for parameter in stage.parameters()}
            others = [(p, p.data) for p in model.parameters() if id(p) not in own]
            try:
                for parameter, values in others:
                    parameter.data = values.new_zeros(()).expand(values.shape)
                value = nest.replace(stage(value), lambda t: t.clone())  # it may hand on a weight
            finally:
                for parameter, values in others:
                    parameter.data = values
    return value


def _refuse_other_gradients(
    model: nn.Module, stages: Sequence[nn.Module], batch: Nest, name: str, must: bool
) -> None:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    try:
        with switch_mode(model, training=True):
            whole = _gradients([Whole(model)], batch, trained)
            # Kept on the host: the device may have no room for the gradients twice.
            whole = {n: gradient.cpu() for n, gradient in whole.items()}
            other = _other_gradient(whole, _gradients(stages, batch, trained))
    except Exception as error:  # reentrant checkpoints, and memory may not suffice for it
        if not must or isinstance(error, torch.OutOfMemoryError):
            return
        raise ConfigurationError(
            f"the gradients of this {type(model).__name__} cannot be asked for, so that its record"
            f" is not known to have the same ({type(error).__name__}:"
            f" {str(error).partition('.')[0]}). Checkpoint with use_reentrant=False, or pass a list"
            " of modules, one per stage."
        ) from error
    if other is not None:
        raise ConfigurationError(
            f"cut at {name}, parameter {other!r} of this {type(model).__name__} gets another"
            f" gradient than in one piece. {_UNSEEN}"
        )


@contextmanager
def explain_failure(model: nn.Module, name: str) -> Iterator[None]:
    """Gives words to whatever the pieces of a model raise and the whole does not."""
    try:
        yield
    except StageError as error:
        raise ConfigurationError(
            f"cut at {name}, this {type(model).__name__} cannot run in stages: {error}"
        ) from error
    except OffbeatError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"cut at {name}, this {type(model).__name__} fails where it does not in one piece"
            f" ({type(error).__name__}: {error})."
            f" {_reason(model, _REMEDY)}"
        ) from error


def _reason(model: nn.Module, otherwise: str) -> str:
    if "forward" not in vars(model):
        return otherwise
    return (
        "Its forward was replaced on the instance, and what that sets around its parts, such as"
        " mixed precision, does not reach other stages. Give the model as it was before, and"
        " Trainer(autocast=torch.bfloat16) for mixed precision."
    )


_REMEDY = "Pass a list of modules, one per stage."
_UNSEEN = (
    f"A later part uses something of an earlier one that cannot be seen from outside. {_REMEDY}"
)


def find_loan(model: nn.Module, batch: Nest) -> Loan:
    """Lends random weights to a model that runs on them; to another nothing."""
    whole = [Whole(model)]
    outputs_of(whole, batch)  # what begins with the first batch begins at the model's own weights
    try:
        with _random_weights(model):
            for training in (True, False):
                with switch_mode(model, training=training):
                    outputs_of(whole, batch)
    except Exception:  # whatever a model may ask of its weights
        return nullcontext
    return partial(_random_weights, model)


@contextmanager
def _random_weights(model: nn.Module) -> Iterator[None]:
    """Lends a model weights of which none is zero or like another, and puts its own back.

    What a model computes at its own may hide what it is: a head that begins at zero makes all that
    comes before look unused. Signs and sizes stay, so that what runs on its own weights runs on
    these; the generators of others are left alone.
    """
    # Kept on the host: the device may have no room for the weights twice.
    own = [
        (p.data, p.detach().to("cpu", copy=True))
        for p in model.parameters()
        if not is_lazy(p) and (p.is_floating_point() or p.is_complex())
    ]
    try:
        for number, (values, _) in enumerate(own):
            generator = torch.Generator(values.device).manual_seed(number)
            noise = torch.empty(values.shape, device=values.device)
            noise.uniform_(-1, 1, generator=generator)
            inputs = values[0].numel() if values.dim() > 1 and len(values) else 1
            small = 0.2 * max(1, inputs) ** -0.5  # so that deep models do not overflow
            # Through .data: to graphs of the caller's this is no change.
            values.copy_(torch.where(values == 0, small * noise, values * (1 + noise / 2)))
        yield
    finally:
        for values, kept in own:
            values.copy_(kept)


def _gradients(
    modules: Sequence[nn.Module], batch: Nest, trained: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The gradient of some function of all outputs, by name; none where it is not connected."""
    value = nest.replace(batch, lambda t: t.clone())
    with leave_untouched(modules), torch.enable_grad():
        for module in modules:
            value = module(value)
        outputs = [tensor for tensor in nest.tensors(value) if tensor.requires_grad]
        if not outputs or not trained:
            return {}
        gradients = torch.autograd.grad(
            outputs,
            list(trained.values()),
            # Unlike for each element, since the sum of a normalised output says nothing.
            [torch.linspace(1, 2, t.numel()).to(t).view(t.shape) for t in outputs],
            allow_unused=True,
        )
    return {
        name: gradient.to_dense()
        for name, gradient in zip(trained, gradients, strict=True)
        if gradient is not None
    }


def _other_gradient(whole: dict[str, Tensor], cut: dict[str, Tensor]) -> str | None:
    """The first parameter whose gradients differ by more than the order of additions explains."""
    norms = {name: _norm(gradient) for name, gradient in whole.items()}
    largest = max(filter(isfinite, norms.values()), default=0.0)
    for name in {**whole, **cut}:
        norm, ours = norms.get(name, 0.0), cut.get(name)
        theirs = whole[name] if name in whole else torch.zeros_like(cut[name])
        apart = norm if ours is None else _norm(ours - theirs.to(ours.device))
        rounding = torch.finfo(theirs.dtype).eps
        if isfinite(norm) and not apart <= rounding**0.5 * norm + 100 * rounding * largest:
            return name
    return None


def _norm(gradient: Tensor) -> float:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return float(torch.linalg.vector_norm(gradient, dtype=wide))
