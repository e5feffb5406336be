"""Random programs: a model, its batches and what a script does meanwhile, as plain values.

A program is a frozen value that prints, so that a failure can be pasted. ``Net`` is written as an
engineer would write it, with the quirks that the program names; nothing in it knows of stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offbeat.methods import (
    ADL,
    DDG,
    DSP,
    FDG,
    FeaturesReplay,
    GPipe,
    Method,
    OneFOneB,
    PipeDream,
    PipeDream2BW,
    StaleWeights,
    Synchronous,
)

WIDTH = 8
"""Of everything, so that any two layers may be tied."""
Batches = list[tuple[Any, Tensor]]


@dataclass(frozen=True)
class Program:
    kind: str
    """One of "blocks", "traced" and "sequential"."""
    places: tuple[int, ...]
    """Blocks at which stages begin."""
    blocks: int
    method: Method
    optimizer: str
    lengths: tuple[int, ...]
    """Of the sequences of each batch."""
    rows: tuple[int, ...]
    inputs: str = "tensor"
    """One of "tensor", "tuple" and "dict"."""
    quirks: dict[str, Any] = field(default_factory=dict)

    def quirk(self, name: str) -> Any:
        return self.quirks.get(name)

    def happens(self, number: int) -> list[tuple[Any, ...]]:
        """What a script does to the model before this batch."""
        return [what for step, *what in self.quirk("changes") or () if step == number]


# ------------------------------------------------------------------ a model


class Block(nn.Module):
    seen: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(program.quirk("dropout") or 0.0)
        norm = program.quirk("norm")
        self.norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.BatchNorm1d(WIDTH)
        if norm is None:
            del self.norm
        if program.quirk("counter") == "block":
            self.register_buffer("seen", torch.zeros(()))
        self.program = (program,)  # a tuple: nothing of it changes
        self.gain, self.kept = 1.0, ""

    def body(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        quirk = self.program[0].quirk
        update: Tensor = self.linear(hidden)
        if hasattr(self, "norm"):
            turned = quirk("norm") == "batch"
            update = self.norm(update.mT).mT if turned else self.norm(update)
        update = F.relu(update, inplace=True) if quirk("act") == "relu_" else torch.tanh(update)
        update = self.drop(update) * self.gain
        return update if mask is None else mask @ update

    def forward(self, hidden: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        quirk = self.program[0].quirk
        if quirk("in place"):
            hidden *= 0.5
        if quirk("counter") == "block":
            self.seen += 1
            hidden = hidden + 0.1 * self.seen
        if quirk("depends") == "block" and hidden.sum() > 0:
            hidden = hidden * 0.5
        if self.kept:
            update = checkpoint(self.body, hidden, mask, use_reentrant=self.kept == "reentrant")
        else:
            update = self.body(hidden, mask)
        hidden = hidden + update * scale
        if quirk("returns") == "tuple":
            return (hidden,)
        if quirk("returns") == "pair":
            return hidden, update.square().mean()
        return hidden


class Net(nn.Module):
    """Prefix, blocks, suffix; ``Inlet`` and ``Outlet`` are the ends where it is a Sequential."""

    seen: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = (program,)
        quirk, tower = program.quirk, program.quirk("tower")
        self.temperature, self.sharpness, self.settings = 1.0, 1.0, {"scale": 1.0}
        if (tower and tower[0] == "behind blocks") or quirk("unused"):
            self.spare = nn.Linear(WIDTH, WIDTH)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        if quirk("mask") == "learned":
            self.slope = nn.Parameter(torch.ones(()))
        if tower and tower[0] == "before":
            self.eyes = nn.Linear(5, WIDTH)
        blocks = [Block(program) for _ in range(program.blocks)]
        if program.kind == "traced":
            for number, block in enumerate(blocks):
                self.add_module(f"block{number}", block)
        else:
            self.blocks = nn.ModuleList(blocks)
        if tower and tower[0] == "behind":
            self.eyes = nn.Linear(5, WIDTH)
        if quirk("counter") in ("before", "behind", "sometimes"):
            self.register_buffer("seen", torch.zeros(()))
        self.outlet = nn.Linear(WIDTH, WIDTH)
        for one, other in quirk("ties") or ():
            layer_of(self, one).weight = layer_of(self, other).weight
        for name in quirk("frozen") or ():
            layer_of(self, name).requires_grad_(False)

    def all_blocks(self) -> list[Any]:
        if self.program[0].kind == "traced":
            return [getattr(self, f"block{n}") for n in range(self.program[0].blocks)]
        return list(self.blocks)

    def before(self, x: Any, pixels: Tensor | None, flag: bool) -> Tensor:
        quirk = self.program[0].quirk
        if isinstance(x, (tuple, list)):
            x = x[0] + x[1]
        hidden: Tensor = self.inlet(x) * self.temperature
        if pixels is not None:
            hidden = torch.cat([hidden, self.eyes(pixels)], 1)
        if quirk("counter") == "before" or (quirk("counter") == "sometimes" and flag):
            self.seen += 1
        if quirk("counter") in ("before", "sometimes"):
            hidden = hidden + 0.1 * self.seen
        if quirk("depends") == "before" and hidden.sum() > 0:
            hidden = hidden * 0.5
        if quirk("no_grad"):
            hidden = hidden.detach()
        return hidden

    def mask(self, hidden: Tensor, number: int) -> Tensor | None:
        """Window masks differ only where sequences are long enough."""
        kind = self.program[0].quirk("mask")
        if kind is None:
            return None
        places = torch.arange(hidden.shape[1])
        apart = places[:, None] - places
        full, near = (apart >= 0).float(), ((apart >= 0) & (apart < 3)).float()
        if kind == "learned":
            return full * self.slope
        return near if kind == "alternate" and number % 2 else full

    def behind(self, hidden: Tensor, early: Tensor, scale: float, flag: bool) -> Tensor:
        quirk = self.program[0].quirk
        if quirk("counter") == "behind":
            self.seen += 1
            hidden = hidden + 0.1 * self.seen
        if quirk("skip") == "always" or (quirk("skip") == "flag" and flag):
            hidden = hidden + early
        if quirk("skip") == "kept":
            hidden = hidden + self.last
        if quirk("depends") == "behind" and hidden.sum() > 0:
            hidden = hidden * 0.5
        if flag and quirk("flag") == "suffix":
            hidden = hidden * 2.0
        scale = scale if quirk("number") == "suffix" else 1.0
        logits: Tensor = self.outlet(hidden.mean(1)) / self.sharpness * self.settings["scale"]
        return logits * scale

    def forward(
        self, x: Any, pixels: Tensor | None = None, scale: float = 1.0, flag: bool = False
    ) -> Any:
        quirk = self.program[0].quirk
        hidden = early = self.before(x, pixels, flag)
        if quirk("skip") == "kept":
            self.last = early
        if quirk("number") == "prefix":
            hidden = hidden * scale
        extra: list[Tensor] = []
        blocks = self.all_blocks()
        at = len(blocks) // 2
        for number, block in enumerate(blocks):
            if number == at and flag and quirk("flag") == "skip":
                continue
            arguments: dict[str, Any] = {}
            if quirk("number") == "block":
                arguments["scale"] = scale
            mask = self.mask(hidden, number)
            if quirk("named"):
                arguments["mask"] = mask
                hidden = block(hidden, **arguments)
            else:
                hidden = block(hidden, mask, **arguments)
            if quirk("returns") == "tuple":
                (hidden,) = hidden
            if quirk("returns") == "pair":
                hidden, loss = hidden
                extra.append(loss)
            if number == at and (quirk("between") or (flag and quirk("flag") == "between")):
                hidden = hidden * 0.5
            if number == at and quirk("cut"):
                hidden = hidden.detach()
            if number == at and flag and quirk("flag") == "twice":
                hidden = self.all_blocks()[at].body(hidden, mask)
        if self.program[0].quirk("tower") == ("behind blocks",) and flag:
            hidden = hidden + self.spare(hidden)
        logits = self.behind(hidden, early, scale, flag)
        if extra:
            return {"logits": logits, "extra": torch.stack(extra).sum()}
        kind = quirk("output")
        return (logits, logits.detach()) if kind == "tuple" else logits


class Inlet(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.inlet, self.temperature = net.inlet, 1.0

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, dict):
            x = x["x"]
        if isinstance(x, (tuple, list)):
            x = x[0] + x[1]
        hidden: Tensor = self.inlet(x) * self.temperature
        return hidden


class Outlet(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.outlet, self.sharpness, self.settings = net.outlet, 1.0, {"scale": 1.0}

    def forward(self, hidden: Tensor) -> Tensor:
        if isinstance(hidden, (tuple, list)):
            hidden = hidden[0]
        logits: Tensor = self.outlet(hidden.mean(1)) / self.sharpness * self.settings["scale"]
        return logits


def layer_of(net: nn.Module, name: str | int) -> nn.Linear:
    """Of a net by its number, or an end of it."""
    if isinstance(name, str):
        holder = next(
            m for m in net.modules() if isinstance(vars(m)["_modules"].get(name), nn.Linear)
        )
        found: nn.Linear = getattr(holder, name)
        return found
    return [m for m in net.modules() if isinstance(m, Block)][name].linear


def build(program: Program) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = Net(program)
    if program.kind != "sequential":
        return net
    return nn.Sequential(Inlet(net), *net.all_blocks(), Outlet(net))


def starts_of(program: Program, model: nn.Module) -> list[nn.Module]:
    """The modules at which the stages after the first begin."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    return [blocks[place] for place in program.places]


def cuts_of(program: Program) -> list[Any]:
    if program.kind == "sequential":
        return [place + 1 for place in program.places]
    return [f"block{'s.' if program.kind == 'blocks' else ''}{n}" for n in program.places]


def batches_of(program: Program) -> Batches:
    generator = torch.Generator().manual_seed(7)
    found: Batches = []
    for number, (rows, length) in enumerate(zip(program.rows, program.lengths, strict=True)):
        x: Any = torch.randn(rows, length, WIDTH, generator=generator)
        y = torch.randint(WIDTH, (rows,), generator=generator)
        if program.inputs == "tuple":
            x = (x, torch.randn(rows, length, WIDTH, generator=generator))
        if program.inputs == "dict":
            x = {"x": x}
            _, *seen = program.quirk("tower") or (None,)
            if number in seen:
                x["pixels"] = torch.randn(rows, 1, 5, generator=generator)
            if program.quirk("number"):
                x["scale"] = (0.5, 1.0, 1.5)[number % 3]
            if number in (program.quirk("flags") or ()):
                x["flag"] = True
        found.append((x, y))
    return found


def loss_of(output: Any, y: Tensor) -> Tensor:
    if isinstance(output, dict):
        loss: Tensor = F.cross_entropy(output["logits"], y) + 0.1 * output["extra"]
        return loss
    return F.cross_entropy(output if isinstance(output, Tensor) else output[0], y)


def penalty_of(named: Any) -> Tensor:
    return sum((1e-2 * p.square().sum() for name, p in named if "weight" in name), torch.zeros(()))


# ------------------------------------------------------------------ what a script does meanwhile


def _halved(self: nn.Module, *arguments: Any, **settings: Any) -> Any:
    return type(self).forward(self, *arguments, **settings) * 0.5


def _halved_net(
    self: nn.Module, x: Any, pixels: Any = None, scale: float = 1.0, flag: bool = False
) -> Any:
    output = type(self).forward(self, x, pixels, scale, flag)
    return output * 0.5 if isinstance(output, Tensor) else output


def change(model: nn.Module, what: str, *how: Any) -> None:
    """Does to a model what a script might do between two steps."""
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    if what in ("temperature", "sharpness"):
        holder = next(m for m in model.modules() if what in vars(m))
        setattr(holder, what, how[0])
    elif what == "settings":
        holder = next(m for m in model.modules() if "settings" in vars(m))
        vars(holder)["settings"]["scale"] = how[0]
    elif what == "drop":
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = how[0]
    elif what in ("gain", "kept"):
        setattr(blocks[how[0]], what, how[1])
    elif what == "hook":
        blocks[how[0]].linear.register_forward_hook(lambda m, a, output: output * 0.5)
    elif what == "patch":
        blocks[how[0]].linear.forward = MethodType(_halved, blocks[how[0]].linear)
    elif what == "patch the model":
        net = isinstance(model, Net)
        model.forward = MethodType(_halved_net if net else _halved, model)
    elif what == "eval":
        blocks[how[0]].eval()
    elif what == "freeze":
        blocks[how[0]].requires_grad_(False)
    elif what == "swap":
        blocks[how[0]].linear = nn.Linear(WIDTH, WIDTH)
        nn.init.ones_(blocks[how[0]].linear.weight)
        nn.init.zeros_(blocks[how[0]].linear.bias)
    elif what == "weights":
        with torch.no_grad():
            blocks[how[0]].linear.weight.mul_(0.5)
    else:
        raise ValueError(what)


# ------------------------------------------------------------------ drawn

FOR_ALL = {
    "dropout": st.just(0.3),
    "norm": st.sampled_from(["batch", "layer"]),
    "act": st.just("relu_"),
    "in place": st.just(True),
    "counter": st.sampled_from(["block", "before", "behind", "sometimes"]),
    "depends": st.sampled_from(["block", "before", "behind"]),
    "penalty": st.just(True),
    "clip": st.just(0.1),
    "evaluate": st.integers(0, 3),
    "resume": st.integers(1, 3),
}
FOR_NETS = {
    "mask": st.sampled_from(["same", "alternate", "learned"]),
    "named": st.just(True),
    "returns": st.sampled_from(["tuple", "pair"]),
    "number": st.sampled_from(["prefix", "block", "suffix"]),
    "flag": st.sampled_from(["skip", "twice", "between", "suffix"]),
    "skip": st.sampled_from(["always", "flag", "kept"]),
    "between": st.just(True),
    "cut": st.just(True),
    "no_grad": st.just(True),
    "unused": st.just(True),
    "output": st.just("tuple"),
}


@st.composite
def changes(draw: Any, blocks: int, steps: int) -> tuple[tuple[Any, ...], ...]:
    block, number = st.integers(0, blocks - 1), st.sampled_from([0.5, 2.0])
    each = st.one_of(
        st.tuples(st.sampled_from(["temperature", "sharpness", "settings"]), number),
        st.tuples(st.just("drop"), st.sampled_from([0.0, 0.5])),
        st.tuples(st.just("gain"), block, number),
        st.tuples(st.just("kept"), block, st.sampled_from(["reentrant", "other"])),
        st.tuples(st.sampled_from(["hook", "patch", "eval", "freeze", "swap", "weights"]), block),
        st.tuples(st.just("patch the model")),
    )
    # Before the first batch, too: then it is part of the model.
    found = draw(st.lists(st.tuples(st.integers(0, steps - 1), each), min_size=1, max_size=2))
    return tuple((step, *what) for step, what in found)


@st.composite
def methods(draw: Any, stages: int) -> Method:
    parts = draw(st.sampled_from([1, 1, 2, 3]))
    rule = draw(st.sampled_from(["stash", "current", "recompute"]))
    return draw(  # type: ignore[no-any-return]
        st.sampled_from(
            [
                Synchronous(), GPipe(parts), OneFOneB(parts), DSP(lag=(0,) * stages, backward=rule),
                PipeDream(accumulate=parts, backward=rule),
                StaleWeights(accumulate=parts, backward=rule), ADL(parts), DDG(), FDG(beta=1.0),
                PipeDream2BW(accumulate=max(parts, stages)), DSP(accumulate=parts, backward=rule),
                FeaturesReplay(),
            ]
        )
    )  # fmt: skip


def has_lag(method: Method) -> bool:
    plain = isinstance(method, Synchronous | GPipe | OneFOneB)
    return not plain and not (isinstance(method, DSP) and method.lag is not None)


def beyond_the_oracle(method: Method) -> list[str]:
    """Quirks of which the oracle does not know what lag makes of them; other tests have them."""
    if not has_lag(method):
        return []
    # Of what leads past a block it notes no values, and a buffer it lets every forward write. With
    # masks matmul rounds by which tensors ask for a gradient, and a record asks for others.
    recomputed = ["ties", "skip", "flag", "changes", "counter", "mask"]
    more: dict[str, list[str]] = {"stash": [], "current": ["ties"], "recompute": recomputed}
    return ["clip", *more[method.rule]]


@st.composite
def programs(
    draw: Any,
    kinds: tuple[str, ...] = ("blocks", "blocks", "sequential"),
    wanted: tuple[str, ...] = (),
) -> Program:
    """``wanted``: quirks that each has."""
    kind = draw(st.sampled_from(kinds))
    blocks = draw(st.integers(2, 5))
    places = draw(st.sets(st.integers(1, blocks - 1), min_size=1, max_size=3))
    steps = draw(st.integers(3, 6))
    known = FOR_ALL if kind == "sequential" else {**FOR_ALL, **FOR_NETS}
    others = st.sampled_from([*known, "ties", "frozen", "changes", "tower"])
    chosen = draw(st.sets(others, max_size=4)) | {*wanted}
    quirks: dict[str, Any] = {n: draw(known[n]) for n in sorted(chosen) if n in known}
    layers = st.sampled_from(["inlet", "outlet", *range(blocks)])
    if "ties" in chosen:
        pairs = st.tuples(layers, layers).filter(lambda pair: pair[0] != pair[1])
        quirks["ties"] = tuple(draw(st.lists(pairs, min_size=1, max_size=2)))
    if "frozen" in chosen:
        quirks["frozen"] = tuple(sorted(draw(st.sets(layers, min_size=1, max_size=2)), key=str))
    if "changes" in chosen:
        quirks["changes"] = draw(changes(blocks, steps))
    if "tower" in chosen and kind != "sequential":
        seen = draw(st.sets(st.integers(0, steps - 1), min_size=1, max_size=3))
        side = draw(st.sampled_from(["before", "before", "behind", "behind blocks"]))
        quirks["tower"] = (side, *sorted(seen)) if side != "behind blocks" else (side,)
    flags = {"flag", "sometimes", ("behind blocks",)} & {
        v for n, v in quirks.items() if n != "ties"
    }
    if kind == "sequential" or not (flags or {"flag", "tower", "number"} & {*quirks}):
        inputs = draw(st.sampled_from(["tensor", "tuple", "dict"]))
    else:
        inputs = "dict"
        quirks["flags"] = tuple(sorted(draw(st.sets(st.integers(0, steps - 1), max_size=3))))
    method = draw(methods(len(places) + 1))
    for name in beyond_the_oracle(method):
        quirks.pop(name, None)
    return Program(
        kind=kind,
        places=tuple(sorted(places)),
        blocks=blocks,
        method=method,
        optimizer=draw(st.sampled_from(["momentum", "adamw"])),
        lengths=tuple(draw(st.lists(st.sampled_from([2, 4, 5]), min_size=steps, max_size=steps))),
        rows=tuple(draw(st.lists(st.sampled_from([4, 4, 3, 6]), min_size=steps, max_size=steps))),
        inputs=inputs,
        quirks=quirks,
    )
