"""A stage's module through torch.compile, with a way back when that fails."""

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])
_log = logging.getLogger("offbeat")


class Compiled:
    """Calls a module compiled; the first calls compile it, which can take a minute.

    Code is kept on disk by PyTorch, so that later runs of the same stage start at once. The module
    itself stays as it is, and evaluation uses it.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._call: Any = torch.compile(_function_of(stage, module), dynamic=False)
        self._first = True

    def __call__(self, given: Any) -> Any:
        if self._call is self._module:
            return self._module(given)
        from torch._dynamo.exc import TorchDynamoException  # importing it takes a second

        start = perf_counter()
        if self._first:
            _log.info("compiling stage %d ...", self._stage)
        try:
            output = self._call(given)
        except TorchDynamoException as error:
            warnings.warn(
                f"stage {self._stage} runs uncompiled, because torch.compile failed:"
                f" {type(error).__name__}: {str(error).strip().splitlines()[0]}",
                stacklevel=2,
            )
            self._call = self._module
            return self._module(given)
        if self._first:
            self._first = False
            _log.info("compiled stage %d in %.1f s", self._stage, perf_counter() - start)
        return output


def uncompiled(function: Function) -> Function:
    """Runs as it is what compiled stages call: ``torch.compiler.disable``, imported if need be."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*arguments)
        return function(*arguments)

    return run  # type: ignore[return-value]


def _function_of(stage: int, module: nn.Module) -> Callable[[Any], Any]:
    """A function with code of its own: torch.compile counts recompilations per code object.

    Stages that share the forward of nn.Sequential would be taken for one function that has to be
    compiled over and over, and given up after the eighth time.
    """

    def call(given: Any) -> Any:
        return module(given)

    call.__code__ = call.__code__.replace(co_name=f"stage_{stage}")
    return call
