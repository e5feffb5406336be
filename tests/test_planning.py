"""The least lag: caps, depths for slow messages, and what "auto" makes of them."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.pages import shown, written
from torch import nn

import offbeat
from helpers import OPTIMIZERS, assert_same_bits, mlp, trained, trainer_for, vector_batches
from offbeat.app.cli import main
from offbeat.app.report.facts import Facts
from offbeat.app.runs import Run
from offbeat.corrections import ClipPerStage, Predict, SpikeCompensation
from offbeat.errors import BatchError, ConfigurationError
from offbeat.methods import (
    ADL,
    DGL,
    DSP,
    FDG,
    METHODS,
    Asynchronous,
    PipeDream,
    StaleWeights,
    Synchronous,
)
from offbeat.methods.auto import Auto, least_depths, load_findings, plan_for, sentence
from offbeat.optimizers import kind_of
from offbeat.schedules.timeline import Costs, timeline

ROOT = Path(__file__).parent.parent
LAGGING = [m for m in METHODS if issubclass(m, Asynchronous) and m is not DGL]

# ------------------------------------------------------------------ caps


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("cap", [0, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("kind", LAGGING, ids=lambda kind: kind.name)
def test_a_cap_bounds_what_is_in_flight_and_cannot_deadlock(
    kind: type[Asynchronous], cap: int, accumulate: int
) -> None:
    for stages in (1, 2, 3, 5):
        settings: dict[str, Any] = {"cap": cap, "accumulate": max(accumulate, stages)}
        method = kind(**settings)
        schedule = method.schedule(stages)
        schedule.table(12).check()
        assert schedule.lags == method.lags(stages)
        assert max(map(schedule.in_flight, range(stages))) <= cap
        loose, tight = kind(accumulate=settings["accumulate"]).lags(stages), method.lags(stages)
        assert all(t <= low for t, low in zip(tight, loose, strict=True))
        assert cap < 100 or tight == loose


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_cap_of_one_batch_per_hop_is_pipedream_s_order(stages: int) -> None:
    for kind in (StaleWeights, FDG, ADL):
        capped = kind(cap=stages - 1, accumulate=1)
        assert capped.schedule(stages).cycles == PipeDream().schedule(stages).cycles


@pytest.mark.parametrize("stages", [3, 4, 8])
def test_no_cap_from_one_batch_per_hop_on_costs_speed_with_free_messages(stages: int) -> None:
    """As it would if all stages were cut to the same number: a hop would have no time at all."""
    for cap in range(stages - 1, 2 * stages - 1):
        assert timeline(StaleWeights(cap=cap), stages).speed_up == pytest.approx(stages)
    assert timeline(StaleWeights(cap=stages - 2), stages).speed_up < stages - 0.5
    level = (stages, *(min(stages, 2 * (stages - 1 - k)) for k in range(1, stages)))
    if stages > 3:
        assert timeline(DSP(lag=level, backward="stash"), stages).speed_up < stages - 0.5


def test_a_capped_method_trains_as_its_depths_say() -> None:
    batches = vector_batches(8)
    ours = trained(mlp(), batches, StaleWeights(cap=3), cuts=[2, 4])
    expected = trained(mlp(), batches, DSP(lag=(3, 1, 0), backward="current"), cuts=[2, 4])
    assert_same_bits(ours.state_dict(), expected.state_dict())
    assert [max(ours.ledger.lags(k).values()) for k in range(3)] == [3, 1, 0]


@pytest.mark.parametrize("cap", [-1, 1.5, "2"])
def test_a_bad_cap_gets_words(cap: Any) -> None:
    with pytest.raises(ConfigurationError, match="give the most micro-batches"):
        PipeDream(cap=cap)


# ------------------------------------------------------------------ depths


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_free_messages_need_one_batch_per_hop(stages: int, accumulate: int) -> None:
    found = least_depths(stages, accumulate=accumulate)
    assert found == tuple(stages - 1 - k for k in range(stages))


@pytest.mark.parametrize("hop", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_slow_messages_get_the_slack_they_need_and_no_more(hop: float) -> None:
    costs = Costs(hop=hop)
    found = least_depths(4, costs=costs)
    assert timeline(DSP(lag=found, backward="stash"), 4, costs=costs).speed_up >= 3.9
    hops = found[0] // 3
    fewer = tuple((hops - 1) * (3 - k) for k in range(4))
    assert timeline(DSP(lag=fewer, backward="stash"), 4, costs=costs).speed_up < 3.9


def test_an_uneven_cut_is_asked_for_no_more_than_it_can_give() -> None:
    assert least_depths(2, costs=Costs(share=(3, 1))) == (1, 0)


# ------------------------------------------------------------------ auto


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("optimizer", "most"),
    [("momentum", 2), ("adam", 0.5), ("muon", 0.5), ("nesterov", 0.5), ("other", 0.5)],
)
@pytest.mark.parametrize("hop", [0.0, 0.2, 1.0])
def test_auto_keeps_lag_small_and_stages_busy(
    stages: int, optimizer: Any, most: float, hop: float
) -> None:
    plan = plan_for(stages, optimizer, Auto(hop=hop))
    assert isinstance(plan.method, Asynchronous)
    parts = plan.method.micro_batches(stages)
    assert parts >= min(stages, 8)
    assert plan.method.depths(stages)[0] / parts <= most  # updates late, on average
    assert max(plan.method.lags(stages)) <= max(1, most)
    speed = timeline(plan.method, stages, costs=Costs(hop=3 * hop / parts)).speed_up
    assert speed == pytest.approx(stages, rel=0.02)
    expected = {"momentum": ("spike-compensation",), "adam": ("extrapolate",)}
    expected["muon"] = expected["adam"]
    assert plan.corrections == expected.get(optimizer, ())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.NAdam(params, lr=0.01),
    ],
)
def test_auto_knows_who_looks_ahead_already(optimizer: Any) -> None:
    assert kind_of(optimizer, list(mlp().named_parameters())) == "nesterov"
    trainer = trainer_for(mlp(), "auto", optimizer, cuts=[2, 4])
    assert trainer.corrections == ()
    assert "looks an update ahead by itself" in str(trainer.plan)

    def mixed(params: Any) -> list[torch.optim.Optimizer]:
        plain = torch.optim.SGD(params[2:], lr=0.1, momentum=0.9)
        return [torch.optim.NAdam(params[:2]), plain]

    assert kind_of(mixed, list(mlp().named_parameters())) == "other"


def test_auto_does_not_split_small_batches_to_nothing() -> None:
    plan = plan_for(8, "momentum", Auto(batch=16), batch_norm=True)
    assert plan.method == PipeDream(accumulate=2)
    assert plan.corrections == ("spike-compensation",)
    assert "more parts of 16 rows would have fewer than 8" in str(plan)
    assert plan_for(8, "momentum", Auto(batch=16)).method == PipeDream(accumulate=8)
    assert plan_for(8, "momentum", Auto(batch=8)).method == PipeDream(accumulate=4)
    assert plan_for(8, "adam", Auto(batch=32)).method == PipeDream(accumulate=14)
    assert plan_for(24, "momentum", Auto(batch=2)).corrections == ()  # a lag of 23
    late = plan_for(8, "adam", Auto(batch=8))
    assert late.method == PipeDream(accumulate=4)
    assert late.corrections == ()
    assert "where none gave a small GPT" in str(late)
    assert "7 of 8 parts late" in str(plan_for(8, "adam", Auto(batch=16)))
    assert plan_for(8, "muon", Auto(batch=8)).corrections == ("extrapolate",)  # a lag of 2
    assert plan_for(8, "muon", Auto(batch=2)).corrections == ("rate-by-lag",)  # of 7
    assert plan_for(1).method == Synchronous()


def test_a_batch_too_small_for_auto_s_parts_leads_to_auto_with_its_size() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    batch = torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)
    trainer = trainer_for(model, "auto", OPTIMIZERS["adamw"], stages=8)
    with pytest.raises(BatchError, match=r"14 micro-batches .* or method=Auto\(batch=8\)\."):
        trainer.step(*batch)
    trainer_for(model, offbeat.Auto(batch=8), OPTIMIZERS["adamw"], stages=8).step(*batch)


def test_auto_sees_batch_norm_wherever_it_is() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4), nn.Linear(4, 2)]
    for model, parts in ((layers, 1), (nn.Sequential(*layers), 1), (nn.Sequential(*layers[1:]), 2)):
        cuts = None if isinstance(model, list) else list(range(1, len(model)))
        trainer = trainer_for(model, Auto(batch=8), cuts=cuts)
        assert trainer.plan is not None
        assert trainer.plan.method == PipeDream(accumulate=parts)
    said = str(plan_for(8, "momentum", Auto(batch=128), batch_norm=True))
    assert "a momentum of 0.013 for PyTorch's 0.1" in said
    assert "0.1 keeps" not in str(plan_for(8, "momentum", Auto(batch=128)))
    assert "0.1 keeps" not in str(plan_for(2, "momentum", Auto(batch=8), batch_norm=True))


def test_auto_warns_of_parts_that_are_smaller_than_it_would_make_them() -> None:
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 4)]
    model = nn.Sequential(*layers).double()
    words = r"16 rows in 3 parts leaves 5 in a part.* at least 8\. Give method=Auto\(batch=16\)"
    with pytest.warns(UserWarning, match=words):
        trainer_for(model, "auto", cuts=[2, 3]).step(*vector_batches(1, rows=16)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_for(model, Auto(batch=16), cuts=[2, 3]).step(*vector_batches(1, rows=16)[0])
        trainer_for(model, "auto", cuts=[2, 3]).step(*vector_batches(1, rows=24)[0])


def test_auto_says_what_it_chose_and_why(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "offbeat")
    trainer = trainer_for(mlp(), "auto", cuts=[2, 4])
    (record,) = caplog.records
    said = record.getMessage()
    assert said == str(trainer.plan)
    assert record.name.split(".")[0] == "offbeat"
    assert capsys.readouterr().out == ""  # a constructor does not print
    assert said.startswith("auto: pipedream:accumulate=3 + spike-compensation\n")
    assert (
        "in flight per stage 2 1 0: the least that keeps equal stages as busy as they can" in said
    )
    assert "3.00 times as fast as one device by the timing model; a cut whose stages" in said
    assert "in 3 parts, as many as stages up to 8: fewer lost accuracy" in said
    assert "in 12 parts: were there fewer, those of the first stage would be more than 2" in str(
        plan_for(24)
    )
    assert trainer.corrections == (SpikeCompensation(),)
    assert trainer.lags == (1, 1, 0)


def test_auto_is_what_it_says() -> None:
    batches = vector_batches(9)
    chosen = trained(mlp(), batches, "auto", cuts=[2, 4])
    assert trainer_for(mlp(), " Auto", cuts=[2, 4]).plan == chosen.plan
    named = trained(
        mlp(), batches, PipeDream(accumulate=3), cuts=[2, 4], corrections=["spike-compensation"]
    )
    assert_same_bits(chosen.state_dict(), named.state_dict())


@contextmanager
def untouched_logging() -> Iterator[None]:
    """As in a process where nobody has set up logging; pytest has."""
    root, own = logging.getLogger(), logging.getLogger("offbeat")
    handlers, levels = root.handlers, (root.level, own.level)
    root.handlers = []
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])


@pytest.mark.parametrize(
    ("set_up", "shown"),
    [
        (lambda: None, "{plan}\n"),
        (lambda: logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s"),
         "INFO {plan}\n"),
        (lambda: logging.basicConfig(), ""),
        (lambda: logging.getLogger("offbeat").setLevel(logging.WARNING), ""),
    ],
    ids=["nobody", "at info", "at warning", "silenced"],
)  # fmt: skip
def test_auto_is_shown_once_where_nobody_has_set_up_logging(
    set_up: Any, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with untouched_logging():
        set_up()
        trainer = trainer_for(mlp(), "auto", cuts=[2, 4])
        trainer_for(mlp(), PipeDream(), cuts=[2, 4])
    assert capsys.readouterr() == ("", shown.format(plan=trainer.plan))
    assert not logging.getLogger("offbeat").handlers  # how the user logs is the user's


def test_corrections_of_one_s_own_win_over_auto_s(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "offbeat")
    own = [Predict(horizon="lag"), ClipPerStage(times=3)]
    trainer = trainer_for(mlp(), Auto(hop=0.5), cuts=[2, 4], corrections=own)
    assert list(trainer.corrections) == own
    said = caplog.records[0].getMessage()
    assert " + predict:horizon=lag + clip-per-stage:times=3\n" in said
    assert said.endswith("corrections as they were given")
    assert trainer_for(mlp(), "auto", cuts=[2, 4], corrections=[]).corrections == ()


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (OPTIMIZERS["sgd"], "other"),
        (OPTIMIZERS["momentum"], "momentum"),
        (OPTIMIZERS["adamw"], "adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: [torch.optim.Muon(p, lr=0.1)], "muon"),
        (lambda p: [torch.optim.Muon(p[:1], lr=0.1), torch.optim.AdamW(p[1:])], "muon"),
        (lambda p: [torch.optim.Muon(p[:1], lr=0.1), torch.optim.SGD(p[1:], lr=0.1)], "other"),
        (
            lambda p: [
                torch.optim.SGD([{"params": [q]} for q in p], lr=0.1, momentum=0.9),
                torch.optim.RMSprop(p),
            ],
            "other",
        ),
        (lambda p: [], "other"),
        (lambda p: p[7], "other"),
    ],
)
def test_the_kind_of_an_optimizer_is_found_out(factory: Any, kind: str) -> None:
    assert kind_of(factory, []) == kind


def test_an_optimizer_that_knows_its_parameters_by_name_is_found_out() -> None:
    model = mlp()
    names = {id(p): name for name, p in model.named_parameters()}

    def by_name(params: Any) -> torch.optim.Optimizer:
        biases = [p for p in params if names[id(p)].endswith("bias")]
        rest = [p for p in params if not names[id(p)].endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": biases, "weight_decay": 0}]
        return torch.optim.AdamW(groups)

    trainer = offbeat.Trainer(
        model, loss=nn.functional.cross_entropy, optimizer=by_name, method="auto", stages=2
    )
    assert trainer.plan is not None
    assert trainer.plan.corrections == ("extrapolate",)


@pytest.mark.parametrize(
    ("settings", "words"), [({"hop": -1}, "hop=-1"), ({"batch": 0}, "batch=0")]
)
def test_bad_settings_of_auto_get_words(settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Auto(**settings)


# ------------------------------------------------------------------ what has been measured


@pytest.mark.parametrize("name", load_findings()["findings"])
def test_a_finding_is_what_was_measured(name: str) -> None:
    finding = load_findings()["findings"][name]
    assert finding.keys() == {"setting", "figures", "facts"}
    measured = json.loads((ROOT / "benchmarks" / "facts.json").read_text())
    assert finding["figures"] == {
        figure: float(written(str(finding["figures"][figure]), shown(fact, None, measured)[0]))
        for figure, fact in finding["facts"].items()
    }


def test_the_page_has_the_limits_of_auto() -> None:
    limits = load_findings()["limits"]
    text = (ROOT / limits["page"]).read_text()
    for template in limits["shown"]:
        assert template.format(**limits) in text, template


def test_every_sentence_is_said_and_cites_findings_that_exist() -> None:
    sentences, findings = load_findings()["sentences"], load_findings()["findings"]
    planner = (ROOT / "src/offbeat/methods/auto.py").read_text()
    reasons = {rule["reason"] for rule in load_findings()["corrections"]}
    assert set(sentences) == reasons | set(re.findall(r"""sentence\(["'](\w+)""", planner))
    cited = set(re.findall(r"\{(\w+)\[", " ".join(sentences.values())))
    assert cited <= set(findings)
    assert "0.06 nats (AdamW) or 0.005 (Muon)" in sentence("extrapolate_late")


def test_a_run_by_auto_stores_what_it_came_to(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "--stages", "4", "--method", "auto:hop=0.1", "--epochs", "1",
              "--out", str(tmp_path / "run")])  # fmt: skip
    assert not left.value.code
    assert "auto: dsp:" in capsys.readouterr().out
    run = Run.load(tmp_path / "run")
    assert run.config["method"] == {"name": "auto", "settings": {"hop": 0.1}}
    facts = Facts(run, "run")
    assert facts.method == "dsp"
    assert facts.method_in_full is not None
    assert facts.method_in_full.startswith("dsp:backward=stash,accumulate=4,lag=")
    assert facts.method_in_full.endswith(" + spike-compensation")
    assert facts.settings["accumulate"] == 4
    for flags, words in ((["--method", "auto:hup=1"], "it takes hop"), (["--method", "auto",
                         "--hybrid", "1"], "give the method it prints")):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            main(["train", "--stages", "2", *flags, "--out", str(tmp_path / "other")])
        assert left.value.code == 2
        assert words in capsys.readouterr().err
