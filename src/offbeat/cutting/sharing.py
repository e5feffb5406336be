"""Which parameters and buffers more than one stage uses. Only this file answers that.

Stages update their own weights and write their own buffers, in processes of their own perhaps. A
weight that several use belongs to the first of them, and the others get what it has read
(:class:`offbeat.stages.relay.Relay`); where it is frozen each has its own. A buffer that one of
them writes the others would not see, so such cuts are refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from offbeat import nest
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest
from offbeat.stages.relay import Relay
from offbeat.stages.trial import call, leave_untouched, same_values, switch_mode
from offbeat.stages.versions import overlapping

Uses = dict[int, list[str]]  # of one tensor: the stages that use it, and its names there


class Sharing:
    """Which stages use each parameter and buffer of a model, and under which names."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._uses: dict[int, Uses] = {}

    @classmethod
    def among(cls, model: nn.Module, stages: Sequence[nn.Module]) -> "Sharing":
        """By what the stages hold."""
        sharing = cls(model)
        for stage, module in enumerate(stages):
            for name, tensor in _tensors_of(module, once=False):
                sharing.note(tensor, stage, name)
        return sharing

    def note(self, tensor: Tensor, stage: int, name: str) -> None:
        self._uses.setdefault(id(tensor), {}).setdefault(stage, []).append(name)

    def uses(self, tensor: Tensor) -> Uses:
        return self._uses.get(id(tensor), {})

    def common(self) -> Iterator[tuple[str, Tensor, Uses]]:
        """The tensors that more than one stage uses, and their names in the unsplit model."""
        for name, tensor in _tensors_of(self._model, once=True):
            if len(self.uses(tensor)) > 1:
                yield name, tensor, self.uses(tensor)

    def refuse_means(self, kind: str = "stages") -> None:
        """Refuses running means of two stages, which every forward of training writes.

        ``kind``: "layers", while it is not known which layers will be one stage.
        """
        norms = [m for m in self._model.modules() if isinstance(m, _NormBase) and m.training]
        means = {id(norm.running_mean) for norm in norms}
        for name, tensor, uses in self.common():
            if id(tensor) in means:
                raise ConfigurationError(
                    f"running mean {name!r} of this {type(self._model).__name__} is used in {kind}"
                    f" {_list(uses)}: stages write their own, so one running mean cannot belong to"
                    " two. Give each a norm of its own, or cut so that all its uses fall into one"
                    " stage."
                )

    def refuse_written_buffers(self, batch: Nest) -> None:
        """Refuses buffers of two stages that a forward of training writes; any may read them."""
        model = self._model
        buffers = {n: t for n, t, _ in self.common() if not isinstance(t, nn.Parameter)}
        if not buffers:
            return
        with leave_untouched([model]), switch_mode(model, training=True):
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            call(model, nest.replace(batch, lambda t: t.clone()))
            for name, buffer in buffers.items():
                if model.get_buffer(name) is buffer and same_values(buffer, before[name]):
                    continue
                raise ConfigurationError(
                    f"buffer {name!r} of this {type(model).__name__} is written in training and"
                    f" lies in stages {_list(self.uses(buffer))}: stages write their own, so what"
                    " one writes the others do not see. Give each stage a buffer of its own, or"
                    " cut so that all its uses fall into one stage."
                )

    def refuse_overlaps(self, *, in_turn: bool, copies: bool) -> None:
        """Refuses two parameters over the same memory where an update of one misses the other.

        Of the whole model, so that all processes refuse alike; a stage looks at its own.
        ``in_turn``: one process runs all stages, without lag. ``copies``: it has several replicas.
        """
        parameters = dict(self._model.named_parameters())
        for one, other in overlapping(parameters.items()):
            stages = [*self.uses(parameters[one]), *self.uses(parameters[other])]
            if len(set(stages)) > 1 and not in_turn:
                why = f"stages {_list(stages)} update their own weights"
            elif copies:
                why = "replicas are copies, in which each has memory of its own"
            else:
                continue
            raise ConfigurationError(
                f"{one!r} and {other!r} are two parameters in the same memory, and {why}, so that"
                " an update of one would no longer reach the other. Give each its own:"
                " nn.Parameter(view.clone()). If they are to be one weight, assign one nn.Parameter"
                " to both modules."
            )


def share(model: nn.Module, stages: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The stages, of which those that share weights pass them on to each other."""
    uses = {
        name: (tensor, sorted(uses))
        for name, tensor, uses in Sharing.among(model, stages).common()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }
    found: list[nn.Module] = []
    for stage, module in enumerate(stages):
        ties = {name: tensor for name, (tensor, users) in uses.items() if stage in users}
        owned = [name for name, (_, users) in uses.items() if stage == users[0]]
        arriving = [name for name, (_, users) in uses.items() if users[0] < stage <= users[-1]]
        leaving = [name for name, (_, users) in uses.items() if users[0] <= stage < users[-1]]
        if owned or arriving:
            module = Relay(module, ties, owned, arriving, leaving)
        found.append(module)
    return tuple(found)


def untie(model: nn.Module) -> nn.Module:
    """Gives every use of a shared weight a weight of its own, beginning at the same values.

    In place, before there is an optimizer or a trainer. What ties them anew, as ``tie_weights()``
    of a Hugging Face model does when it is loaded, has to be told not to.
    """
    _untie(model, set())
    return model


def _untie(module: nn.Module, seen: set[int]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if id(parameter) in seen:
            own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(module, name, own)
        seen.add(id(parameter))
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if not name or "." in name:
            continue
        if id(child) in seen and any(True for _ in child.parameters()):
            child = deepcopy(child)
            setattr(module, name, child)
        seen.add(id(child))
        _untie(child, seen)


def _tensors_of(module: nn.Module, *, once: bool) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=once)
    return [*parameters, *module.named_buffers(remove_duplicate=once)]


def _list(stages: Iterable[int]) -> str:
    *others, last = map(str, sorted(stages))
    return f"{', '.join(others)} and {last}"
