"""Stand-ins: what a stage has in the place of weights and values of other stages.

The last stage runs for nothing what comes before the blocks, with zeros for weights, so that what
lies behind them finds what it needs of the batch. Whatever is computed from a stand-in is one, too.
So nothing can come of zeros unseen, in any batch: where a value counts, the stand-in says why there
is none.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from offbeat import nest
from offbeat.errors import StageError
from offbeat.nest import Nest

_OF_FIRST = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
"""Functions of which tensors behind the first only give a shape or a type."""
_OF_SHAPE = frozenset(
    f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn")
) | frozenset(f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "tensor"))
"""Functions whose result has another tensor's shape or type, and nothing of its values."""
_ABOUT = frozenset(
    ("__get__", "__len__", "__hash__", "__repr__", "__format__", "size", "dim", "ndimension",
     "numel", "nelement", "stride", "type", "element_size", "get_device", "storage_offset",
     "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_same_size",
     "result_type", "promote_types", "can_cast")
)  # fmt: skip
"""Functions that say something of a tensor without its values."""


_OF_GRAPH = (Tensor.requires_grad, Tensor.is_leaf, Tensor.grad_fn)
"""What is said only of the tensor itself."""


class StandIn(Tensor):
    """Zeros in the place of a tensor of another stage, or something computed from such zeros."""

    why: str
    """What to say where its value counts."""
    sealed: bool
    """Whether nothing at all may be computed from it."""
    asked: bool
    """Whether somebody asked for its shape or type."""
    _known: ClassVar[dict[int, tuple[Tensor, Tensor]] | None] = None
    """Stand-ins and their values, by id; None while what is computed from them is for nothing."""

    @classmethod
    def of(cls, tensor: Tensor, why: str, *, sealed: bool = False) -> Self:
        with torch._C.DisableTorchFunctionSubclass():
            stand_in = tensor.detach().as_subclass(cls)
        _mark(stand_in, why, sealed=sealed)
        return stand_in

    @classmethod
    def reveal(cls, stand_ins: Nest, values: Nest) -> None:
        """From here on values count, and those of these stand-ins are known."""
        ours, theirs = nest.tensors(stand_ins), nest.tensors(values)
        pairs = zip(ours, theirs, strict=True) if len(ours) == len(theirs) else ()
        cls._known = {id(one): (one, value) for one, value in pairs if isinstance(one, cls)}

    @classmethod
    def conceal(cls) -> None:
        """From here on what is computed is for nothing."""
        cls._known = None

    @classmethod
    def without(cls, values: Nest) -> Nest:
        """The same with values in the place of stand-ins; refuses those of which none is known."""
        found = nest.replace(values, cls._known_value)
        for tensor in nest.tensors(found):
            if isinstance(tensor, cls):
                raise StageError(tensor.why)
        return found

    @classmethod
    def _known_value(cls, tensor: Tensor) -> Tensor:
        return (cls._known or {}).get(id(tensor), (tensor, tensor))[1]

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # as good for another replica

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if cls._known:
            args, kwargs = nest.replace((list(args), kwargs), cls._known_value)
        read = args[:1] if name in _OF_FIRST else [args, kwargs]
        found = [tensor for tensor in nest.tensors(read) if isinstance(tensor, cls)]
        counts = cls._known is not None or any(tensor.sealed for tensor in found)
        for stand_in in found:
            stand_in.asked = True
        if found and counts and _writes(name):
            raise StageError(found[0].why)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except Exception as error:
            if found and counts:
                raise StageError(found[0].why) from error
            raise
        if not found or name in _OF_SHAPE:
            return result
        tensors = nest.tensors(args[0] if name == "__setitem__" else result)
        made = [tensor for tensor in tensors if not isinstance(tensor, cls)]
        about = name in _ABOUT and not (counts and getattr(func, "__self__", None) in _OF_GRAPH)
        if (counts and made) or not (tensors or about):
            raise StageError(found[0].why)
        for tensor in made:
            if isinstance(tensor, nn.Parameter):  # written in place
                raise StageError(found[0].why)
            tensor.__class__ = cls
            _mark(tensor, found[0].why, sealed=False)
        return result


def _mark(tensor: Any, why: str, *, sealed: bool) -> None:
    tensor.why, tensor.sealed, tensor.asked = why, sealed, False


def _writes(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
