"""What their trainer calls in place of the model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from offbeat.nest import Nest


class StandIn:
    """Answers like a model in everything but training: nothing here changes weights or modes."""

    def __init__(self, model: nn.Module) -> None:
        self.stands_for = model

    def __getattr__(self, name: str) -> Any:
        if name == "stands_for":
            raise AttributeError(name)
        return getattr(self.stands_for, name)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Mapping) and not settings:
            return self.forward(dict(arguments[0]))
        if arguments:
            raise TypeError("call the model with its arguments by name: model(**inputs)")
        return self.forward(settings)

    def forward(self, inputs: dict[str, Nest]) -> Any:
        raise NotImplementedError

    def train(self, mode: bool = True) -> "StandIn":  # noqa: ARG002
        return self

    def eval(self) -> "StandIn":
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients that are gathered belong to stages."""


class Call(BaseException):
    """Ends a computation of the loss where it calls the model."""

    def __init__(self, inputs: dict[str, Nest]) -> None:
        super().__init__("the model was called")
        self.inputs = inputs


class Question(StandIn):
    """Tells what the model is called with."""

    def forward(self, inputs: dict[str, Nest]) -> Any:
        raise Call(inputs)


class Answer(StandIn):
    """Gives an output that is there already."""

    def __init__(self, model: nn.Module, output: Any) -> None:
        super().__init__(model)
        self._output = output

    def forward(self, inputs: dict[str, Nest]) -> Any:  # noqa: ARG002
        return self._output


class Output(dict[str, Any]):
    """An output that has come from another process: a dict with attributes, as the model's is."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
