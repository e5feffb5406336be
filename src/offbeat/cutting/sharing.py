"""Which parameters and buffers more than one stage uses. Only this file answers that.

Stages update their own weights and write their own buffers, in processes of their own perhaps.
Two stages that use one tensor would each have their own idea of it, so such cuts are refused.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from offbeat import nest
from offbeat.errors import ConfigurationError
from offbeat.nest import Nest
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

    def refuse_ties(self, kind: str = "stages") -> None:
        """Refuses parameters of two stages, and running means, which every training forward writes.

        ``kind``: "layers", while it is not known which layers will be one stage.
        """
        norms = [m for m in self._model.modules() if isinstance(m, _NormBase) and m.training]
        means = {id(norm.running_mean) for norm in norms}
        for name, tensor, uses in self.common():
            if isinstance(tensor, nn.Parameter) or id(tensor) in means:
                what = "parameter" if isinstance(tensor, nn.Parameter) else "running mean"
                frozen = what == "parameter" and not tensor.requires_grad
                raise ConfigurationError(
                    f"{what} {name!r} of this {type(self._model).__name__} is used in {kind}"
                    f" {_list(uses)}: stages update their own, so one {what} cannot belong to two."
                    " Untie it, or cut so that all its uses fall into one stage"
                    f"{', or, if it is never trained, make it a buffer' * frozen}."
                )

    def refuse_tied_ends(self) -> None:
        """Refuses parameters used by both ends of a model: 0 is before the blocks, 1 later."""
        for _, _, uses in self.common():
            first, later = uses[0][0], uses[1][-1]
            again = "is used before the blocks and once they have begun"
            if first != later:
                again = f"is also {later!r}, which is used once the blocks have begun"
            raise ConfigurationError(
                f"parameter {first!r} {again}: stages update their own weights, so one parameter"
                " cannot belong to two. Untie it (Hugging Face:"
                " config.tie_word_embeddings = False)."
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
                " to both modules, and cut so that both fall into one stage."
            )


def _tensors_of(module: nn.Module, *, once: bool) -> list[tuple[str, Tensor]]:
    parameters = module.named_parameters(remove_duplicate=once)
    return [*parameters, *module.named_buffers(remove_duplicate=once)]


def _list(stages: Iterable[int]) -> str:
    *others, last = map(str, sorted(stages))
    return f"{', '.join(others)} and {last}"
