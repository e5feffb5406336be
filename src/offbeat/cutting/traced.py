"""Any other model: recorded by PyTorch's own tools and divided where a named module begins.

Parameters stay the model's own. A record is of one mode of every module and of the sizes that its
guards let through; another batch or mode is recorded when it comes, by every process for itself.
What a later stage needs of an earlier one than its neighbour travels through the stages in between.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from offbeat import nest
from offbeat.cutting.balance import cut_by_costs
from offbeat.cutting.compare import Trial, compare_record
from offbeat.cutting.costs import Spans
from offbeat.cutting.cut import Balance, Cut, Wish
from offbeat.cutting.record import SingleDraws
from offbeat.errors import BatchError, ConfigurationError
from offbeat.nest import Nest
from offbeat.stages.attributes import Change, hook_of
from offbeat.stages.trial import Whole, outputs_of, switch_mode

_MOST_RECORDS = 64

if TYPE_CHECKING:
    from offbeat.cutting.records import Records


@dataclass(frozen=True, kw_only=True)
class TracedCut(Cut):
    """A model split where named modules are called; without names the counted cost decides."""

    records: "Records | None" = None
    own_values: bool = False
    """Whether the model runs at its own weights alone."""

    @classmethod
    def plan(cls, wish: Wish) -> "TracedCut | None":
        model = wish.model
        if not isinstance(model, nn.Module):
            return None
        near = candidates(model)
        if wish.cuts is None:
            if wish.count > len(near):
                raise ConfigurationError(
                    f"{wish.count} stages, but this {type(model).__name__} has {len(near)} modules"
                    " to cut at: give fewer stages, or a list of modules, one per stage."
                )
            return cls(model=model, stages=wish.count, places=None)
        known = dict(model.named_modules())
        for path in wish.cuts:
            if isinstance(path, int):
                raise ConfigurationError(
                    f"cuts={list(wish.cuts)}: this {type(model).__name__} has no numbered children"
                    " to cut at; give the paths of modules."
                )
            if path not in known or not path:
                raise ConfigurationError(
                    f"cuts: {path!r} is not a module of this {type(model).__name__}. A stage"
                    f" begins at the path of a module, such as {', '.join(near[:8])}."
                )
        return cls(model=model, stages=wish.count, places=tuple(map(str, wish.cuts)))

    def make(self, batch: Nest, balance: Balance) -> "TracedCut":  # noqa: ARG002
        model, paths = self.model, [str(path) for path in self.places or ()]
        if self.absent is not None:
            raise ConfigurationError(
                f"this {type(model).__name__} would have to be recorded, for which a process has"
                " all weights, and it was built on meta: build it with its weights, or pass a list"
                " of modules, one per stage."
            )
        if (hook := hook_of([model])) is not None:
            raise ConfigurationError(
                f"the hook {hook} would be called while this {type(model).__name__} is traced and"
                " never again. Take it off, or pass a list of modules, one per stage."
            )
        _refuse_deciding_draws(model, batch)
        spans = Spans(model, candidates(model) if self.places is None else [])
        with _without_fast_path():
            trial = Trial(model, batch, recorded=True, first=spans.counted)
            if self.places is None:
                costs = spans.of_each()
                if self.stages > len(costs):
                    raise ConfigurationError(
                        f"{self.stages} stages, but one forward of this {type(model).__name__}"
                        f" calls {len(costs)} modules once: give fewer stages, or a list of"
                        " modules, one per stage."
                    )
                places = cut_by_costs([*costs.values()], self.stages)
                paths = [[*costs][place] for place in places]
            from offbeat.cutting.records import RecordedStage, Records  # takes a second to import

            records = Records(model, paths)
            for training in (True, False):
                with switch_mode(model, training=training), torch.set_grad_enabled(training):
                    records.find(batch)
            stages = [RecordedStage(records, number) for number in range(self.stages)]
            trial.compare(stages, ", ".join(paths))
        own_values = trial.lend is nullcontext
        return replace(
            self,
            places=tuple(paths),
            modules=tuple(stages),
            records=records,
            own_values=own_values,
        )

    def copy(self) -> Self:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its own deprecations
            return super().copy()

    @property
    def needs_values(self) -> bool:
        """What does not run at random weights is recorded again at those that were."""
        return self.own_values

    def trust(self, lent: Callable[[], AbstractContextManager[None]]) -> None:
        if self.records is not None:
            self.records.lent = lent

    def check_batch(self, inputs: Sequence[Nest], micro_batches: int) -> None:
        """Records what these parts need, before the batch has begun."""
        if self.records is not None:
            for x in inputs:
                for part in nest.split(x, micro_batches):
                    self._prepare(self.records, part)

    def _prepare(self, records: "Records", batch: Nest) -> None:
        known = records.known()
        try:
            found = records.find(batch)
            if found not in known:
                if len(known) >= _MOST_RECORDS:
                    raise ConfigurationError(
                        f"{len(known)} records were made of this {type(self.model).__name__}, and"
                        " this batch needs another one: every plain number and, where the model"
                        " fixes them, every size needs its own. Give numbers that change as"
                        " tensors, and pad sequences to few lengths."
                    )
                with records.lent(), _without_fast_path():
                    compare_record(self.model, self.modules, batch, self._name)
        except ConfigurationError as error:
            records.forget_all_but(known)
            raise BatchError(f"{error} The batch was not started.") from error

    @property
    def _name(self) -> str:
        return ", ".join(map(str, self.places or ()))

    def follow(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.name != "training":
                known = "" if not change.is_plain else f" from {change.before!r} to {change.now!r}"
                raise ConfigurationError(
                    f"{change} was changed{known} since this model was traced, and a trace has such"
                    " values built in. Put it back, or build a new Trainer with the weights of"
                    " state_dict(); a list of modules as stages follows changes. The batch was not"
                    " started."
                )

    def check_timing(self) -> None:
        raise ConfigurationError(
            f"balance='measured': the parts of this {type(self.model).__name__}, which is traced,"
            " cannot be run alone. Leave out balance, or give cuts=."
        )


def candidates(model: nn.Module) -> list[str]:
    """Paths at which a stage could begin: children, and those of what consists of a list."""
    paths: list[str] = []
    for name, child in model.named_children():
        lists = isinstance(child, nn.Sequential | nn.ModuleList)
        if lists or any(isinstance(m, nn.ModuleList) for m in child.modules()):
            paths += [f"{name}.{path}" for path in candidates(child)] or [name] * (not lists)
        else:
            paths.append(name)
    return paths


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Without what nn.MultiheadAttention does in evaluation alone, which no record has."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _refuse_deciding_draws(model: nn.Module, batch: Nest) -> None:
    """Refuses a model that draws a number to decide which of its modules run."""
    orders: list[list[nn.Module]] = []
    for number in (0.0, 0.999999):
        orders.append([])
        calls = [
            m.register_forward_pre_hook(lambda m, _: orders[-1].append(m)) for m in model.modules()
        ]
        with switch_mode(model, training=True), SingleDraws(number):
            outputs_of([Whole(model)], batch)
        for call in calls:
            call.remove()
    if orders[0] != orders[1]:
        raise ConfigurationError(
            f"this {type(model).__name__} draws a number to decide which of its modules run"
            " (LayerDrop), and a record always runs the same. Set it to 0, in models of Hugging"
            " Face config.layerdrop, encoder_layerdrop or decoder_layerdrop."
        )
