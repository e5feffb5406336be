"""Whether a cut computes what the whole model does: outputs, gradients and buffers compared.

At the model's own weights, since what a layer begins with its first batch must begin there, and at
random ones, behind which nothing can hide; in training and in evaluation. In each of these ways the
model runs once in one piece and once in stages, and each run says all that is compared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offbeat import nest
from offbeat.cutting.sharing import Sharing, share
from offbeat.errors import ConfigurationError, OffbeatError, StageError
from offbeat.nest import Nest
from offbeat.stages.trial import Whole, leave_untouched, same_values, switch_mode

Loan = Callable[[], AbstractContextManager[None]]
"""Lends a model random weights, or nothing where it does not run on them."""


Around = Callable[[], AbstractContextManager[object]]
"""What is entered around a forward."""


Collect = Callable[[nn.Module, Nest], dict[str, Tensor]]
"""The gradients of a model's output, by name."""


class Way(NamedTuple):
    """How a model runs when it is compared."""

    random: bool
    """Whether at random weights."""
    training: bool


@dataclass(frozen=True)
class Found:
    """What a forward came to."""

    output: Nest
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor] | Exception | None
    """By name, or why there are none; None where nobody asked."""


class Trial:
    """A model in one piece on a batch, once in each way: what its stages have to come to."""

    def __init__(
        self,
        model: nn.Module,
        batch: Nest,
        *,
        recorded: bool = False,
        first: Around = nullcontext,
        look: Around = nullcontext,
        light: bool = False,
    ) -> None:
        """``recorded``: stages run other code than the model's own, which may know a gradient of
        its own. ``first`` is entered around the first forward, ``look`` around the one in training
        at the weights that hide least. ``light``: the model has random weights as it is, which take
        no memory; so no gradient may take any, either.
        """
        self.model, self.batch, self._recorded = model, batch, recorded
        self._whole = Whole(model)
        self._collect: Collect = _sampled_gradients if light else _gradients
        self._found: dict[Way, Found] = {}
        self.lend: Loan = nullcontext
        if light:
            self._run_light(first, look)
            return
        # What begins with the first batch begins at the model's own weights.
        self._run_whole(Way(random=False, training=True), first)
        self._run_whole(Way(random=False, training=False))
        self.lend = partial(_random_weights, model)
        try:
            with self.lend():
                self._run_whole(Way(random=True, training=False))
                self._run_whole(Way(random=True, training=True), look, gradients=True)
        except OffbeatError:
            raise
        except Exception:  # whatever a model may ask of its weights
            self._found = {way: found for way, found in self._found.items() if not way.random}
            self.lend = nullcontext
            self._run_whole(Way(random=False, training=True), look, gradients=True)

    def _run_light(self, first: Around, look: Around) -> None:
        try:
            self._run_whole(Way(random=True, training=False), first)
            self._run_whole(Way(random=True, training=True), look, gradients=True)
        except OffbeatError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"this {type(self.model).__name__} was built on meta, so its stages are compared"
                f" with the whole at random weights, and it does not run on these"
                f" ({type(error).__name__}: {error}). Build it with its weights, or pass a list of"
                " modules, one per stage."
            ) from error

    def _run_whole(
        self,
        way: Way,
        around: Around = nullcontext,
        *,
        gradients: bool = False,
    ) -> None:
        collect = self._collect if gradients else None
        self._found[way] = _run(
            self.model, [self._whole], self.batch, way.training, collect, around
        )

    def compare(self, stages: Sequence[nn.Module], name: str) -> None:
        """Refuses stages that do not compute what the whole model does, and remember it alike."""
        stages = share(self.model, stages)
        Sharing.among(self.model, stages).refuse_written_buffers(self.batch)
        for way in sorted(self._found, key=lambda way: (way.random, not way.training)):
            whole = self._found.pop(way)
            with self.lend() if way.random else nullcontext():
                cut = partial(
                    _run, self.model, stages, self.batch, way.training,
                    None if whole.gradients is None else self._collect,
                )  # fmt: skip
                _compare(self.model, cut, way.training, whole, name, self._recorded)


def compare_record(model: nn.Module, stages: Sequence[nn.Module], batch: Nest, name: str) -> None:
    """The same for a record made in the midst of training: in one mode, at the model's weights."""
    training = model.training
    collect = _gradients if training else None
    whole = _run(model, [Whole(model)], batch, training, collect)
    _compare(model, partial(_run, model, stages, batch, training, collect), training, whole, name)


def _run(
    model: nn.Module,
    modules: Sequence[nn.Module],
    batch: Nest,
    training: bool,
    collect: Collect | None,
    around: Around = nullcontext,
) -> Found:
    """Runs a model's modules one after the other, each with its own weights alone."""
    if collect is not None:
        try:
            return _run_once(model, modules, batch, training, collect, around)
        except OffbeatError:
            raise
        except Exception as error:  # reentrant checkpoints, and memory may not suffice for it
            found = _run_once(model, modules, batch, training, None, around)
            return replace(found, gradients=error)
    return _run_once(model, modules, batch, training, None, around)


def _run_once(
    model: nn.Module,
    modules: Sequence[nn.Module],
    batch: Nest,
    training: bool,
    collect: Collect | None,
    around: Around,
) -> Found:
    value = nest.replace(batch, lambda t: t.clone())
    with switch_mode(model, training=training), leave_untouched([model, *modules]):
        with around(), torch.set_grad_enabled(collect is not None):
            for module in modules:
                with _alone(model, module):
                    # Copied, since it may hand on a weight or a buffer.
                    value = nest.replace(module(value), lambda t: t.clone())
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        gradients = None if collect is None else collect(model, value)
    return Found(nest.replace(value, lambda t: t.detach()), buffers, gradients)


@contextmanager
def _alone(model: nn.Module, stage: nn.Module) -> Iterator[None]:
    """Takes away the weights that are not the stage's, as in processes."""
    own = {id(parameter) for parameter in stage.parameters()}
    others = [(p, p.data) for p in model.parameters() if id(p) not in own]
    try:
        for parameter, values in others:
            parameter.data = values.new_zeros(()).expand(values.shape)
        yield
    finally:
        for parameter, values in others:
            parameter.data = values


def _compare(
    model: nn.Module,
    run: Callable[[], Found],
    training: bool,
    whole: Found,
    name: str,
    must: bool = True,
) -> None:
    kind = type(model).__name__
    with explain_failure(model, name):
        cut = run()
    if not same_values(cut.output, whole.output):
        raise ConfigurationError(
            f"cut at {name}, this {kind} computes something else than in one piece"
            f" {'in training' if training else 'in evaluation'}. {_reason(model, _UNSEEN)}"
        )
    if whole.gradients is not None:
        _refuse_other_gradients(model, whole.gradients, cut.gradients, name, must)
    for key in whole.buffers:
        if not same_values(cut.buffers.get(key), whole.buffers[key]):
            raise ConfigurationError(
                f"cut at {name}, buffer {key!r} of this {kind} holds something else after a"
                f" forward than in one piece. {_UNSEEN}"
            )


def _refuse_other_gradients(
    model: nn.Module,
    whole: dict[str, Tensor] | Exception,
    cut: dict[str, Tensor] | Exception | None,
    name: str,
    must: bool,
) -> None:
    for found in (whole, cut):
        if isinstance(found, Exception):
            if not must or isinstance(found, torch.OutOfMemoryError):
                return
            raise ConfigurationError(
                f"the gradients of this {type(model).__name__} cannot be asked for, so that its"
                f" record is not known to have the same ({type(found).__name__}:"
                f" {str(found).partition('.')[0]}). Checkpoint with use_reentrant=False, or pass a"
                " list of modules, one per stage."
            ) from found
    assert isinstance(whole, dict)
    assert isinstance(cut, dict)
    other = _other_gradient(whole, cut)
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


def _gradients(model: nn.Module, output: Nest) -> dict[str, Tensor]:
    """The gradient of some function of all outputs, by name; none where it is not connected.

    On the host: the device may have no room for the gradients twice.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    outputs, starts = _ends_of(output)
    if not outputs or not trained:
        return {}
    gradients = torch.autograd.grad(outputs, list(trained.values()), starts, allow_unused=True)
    return {
        name: gradient.to_dense().cpu()
        for name, gradient in zip(trained, gradients, strict=True)
        if gradient is not None
    }


def _ends_of(output: Nest) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have a graph, and where their backwards begin."""
    outputs = [tensor for tensor in nest.tensors(output) if tensor.requires_grad]
    # Unlike for each element, since the sum of a normalised output says nothing.
    return outputs, [torch.linspace(1, 2, t.numel()).to(t).view(t.shape) for t in outputs]


_SAMPLE = 1 << 12
"""Elements of a gradient that are kept where the whole has no room."""


def _sampled_gradients(model: nn.Module, output: Nest) -> dict[str, Tensor]:
    """Of each gradient its norm and some elements; one gradient at a time is in memory."""
    found: dict[str, Tensor] = {}

    def sample(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        flat = parameter.grad.to_dense().flatten()
        parameter.grad = None
        norm = torch.linalg.vector_norm(flat, dtype=torch.float32)
        some = flat[:: 1 + len(flat) // _SAMPLE].float()
        found[name] = torch.cat([some, norm[None]]).cpu()

    outputs, starts = _ends_of(output)
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(sample, name=name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        if outputs:
            torch.autograd.backward(outputs, starts)
    finally:
        for hook in hooks:
            hook.remove()
    return found


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
