"""The page in a real browser: drawn, clicked, zoomed, and silent on the console."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.app.report import page
from offbeat.app.runs import CONFIG, Run
from stored_runs import hostile_run, made_run

# Chromium talks over descriptors 3 and 4; Python cannot promise which numbers a pipe gets.
_ON_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_ANSWER_S = 20.0


def chromium() -> str | None:
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    cache = Path.home() / ".cache" / "ms-playwright"
    builds = [p for n in ("chrome", "headless_shell") for p in cache.glob(f"chromium*/*/{n}")]
    return str(builds[0]) if builds else None


class Browser:
    """Headless Chromium, driven over its DevTools pipe."""

    def __init__(self, program: str, profile: Path) -> None:
        its_input, self._write = os.pipe()
        self._read, its_output = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={profile}", "--no-first-run", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_3_AND_4, str(its_input), str(its_output), program, *flags],
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._calls:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _ANSWER_S
        while b"\0" not in self._buffer:
            left = max(0.0, end - time.monotonic())
            assert select.select([self._read], [], [], left)[0], "the browser is silent"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        finally:
            os.close(self._write)
            os.close(self._read)
            self._process.wait(_ANSWER_S)

    # What a person does and sees.

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> None:
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())
        self.settle()

    def settle(self) -> None:
        """Two frames: whatever was asked for has been drawn."""
        frames = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.js(f"new Promise(done => {frames})")

    def js(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def problems(self) -> list[dict[str, Any]]:
        """Exceptions, anything on the console, and requests for anything but the page."""
        self.settle()
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        said = [event for event in self.events if event["method"] in kinds]
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return said + asked[1:]

    def place_of(self, selector: str) -> tuple[float, float]:
        """The top left corner of an element, scrolled into view."""
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{behavior: 'instant'}})")
        corner = f"document.querySelector({selector!r}).getBoundingClientRect()"
        left, top = self.js(f"(() => {{ const r = {corner}; return [r.left, r.top]; }})()")
        return left, top

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)
        self.settle()

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r}).innerText"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium, to run the page in a browser")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@dataclass(frozen=True)
class Pages:
    """Pages on disk, made once."""

    one: Path
    several: Path
    hostile: Path
    empty: Path
    long: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    folder = tmp_path_factory.mktemp("runs")
    one = made_run(folder / "stale", steps=40)
    several = [one, made_run(folder / "bp", "synchronous"), made_run(folder / "two", replicas=2)]
    script = made_run(folder / "<" / "script><script>document.title='taken'")
    (folder / "empty").mkdir()
    (folder / "empty" / CONFIG).write_text("{}")
    of = {
        "one": [one],
        "several": several,
        "hostile": [hostile_run(folder), script, script],
        "empty": [Run.load(folder / "empty")],
        "long": [made_run(folder / "long", steps=400)],
    }
    paths = {name: folder / f"{name}.html" for name in of}
    for name, runs in of.items():
        paths[name].write_text(page(runs), encoding="utf-8")
    return Pages(**paths)


_COLOURS_DRAWN = """(() => {
  const canvas = document.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => style.getPropertyValue(`--${name}`).trim().match(/[0-9a-f]{2}/g)
    .map((hex) => parseInt(hex, 16));
  const names = ["F", "B", "U"], colours = names.map(rgb), counts = { F: 0, B: 0, U: 0 };
  let painted = 0;
  for (let k = 0; k < data.length; k += 4) {
    const [r, g, b, a] = data.slice(k, k + 4);
    if (a < 250 || Math.max(r, g, b) - Math.min(r, g, b) < 60) continue;
    const away = colours.map(([x, y, z]) => Math.hypot(r - x, g - y, b - z));
    counts[names[away.indexOf(Math.min(...away))]] += 1;
    painted += 1;
  }
  return Object.fromEntries(names.map((name) => [name, counts[name] / painted]));
})()"""
"""Which share of all coloured points is nearest to the colour of a kind."""

FIRST = (8, 22 + 10)
"""From the corner of a timeline's plot to the middle of the first action of its first row."""


def first_action(browser: Browser) -> tuple[float, float]:
    left, top = browser.place_of("canvas")
    # Row names stand left of the plot; the script knows their width, a reader sees it.
    pen = "document.querySelector('canvas').getContext('2d')"
    gutter = browser.js(f"Math.ceil({pen}.measureText('stage 0').width) + 10")
    return left + gutter + FIRST[0], top + FIRST[1]


def test_the_harness_sees_errors_and_requests(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<img src=missing.png><script>console.error('a'); throw Error('b')</script>")
    browser.open(bad)
    assert len(browser.problems()) >= 3


@pytest.mark.parametrize("name", ["one", "several", "hostile", "empty"])
@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_render_without_a_word_on_the_console(
    browser: Browser, pages: Pages, name: str, width: int, dark: bool
) -> None:
    browser.open(getattr(pages, name), width=width, dark=dark)
    assert browser.problems() == []
    assert browser.js("document.title").endswith("offbeat report")
    assert browser.js("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll')"
    wide += f" && e.getBoundingClientRect().right > {width + 1}).map(e => e.outerHTML)"
    assert browser.js(wide) == []


def test_a_click_on_the_timeline_shows_the_action(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one)
    browser.click(*first_action(browser))
    shown = browser.text(".details").split("\n")
    facts = dict(zip(shown[::2], shown[1::2], strict=True))
    assert facts == {
        "action": "forward (0F0)",
        "stage": "0",
        "replica": "0",
        "batch": "0",
        "version read": "0",
        "lag": "0 updates",
        "start": "0 s",
        "duration": "10 ms",
    }
    assert browser.problems() == []


def test_a_tap_on_a_phone_shows_the_action(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one, width=375)
    browser.tap(*first_action(browser))
    assert "forward (0F0)" in browser.text(".details")


def test_two_fingers_zoom_the_timeline(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one, width=375)
    before = browser.text(".range")
    x, y = first_action(browser)
    for kind, apart in (("touchStart", 40), ("touchMove", 80), ("touchMove", 120)):
        fingers = [{"x": x + 100 - apart, "y": y, "id": 0}, {"x": x + 100 + apart, "y": y, "id": 1}]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    assert browser.text(".range") != before
    assert browser.text(".details") == "No action chosen yet."
    assert browser.js("visualViewport.scale") == 1, "the timeline zooms, not the page"


def test_keys_go_from_action_to_action(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one)
    browser.js("document.querySelector('canvas').focus()")
    browser.press("ArrowRight")
    assert "forward (0F0)" in browser.text(".details")
    browser.press("ArrowRight")
    assert "forward (0F1)" in browser.text(".details")
    for _ in range(3):
        browser.press("ArrowDown")
    assert "(3F0)" in browser.text(".details") and "2.5" in browser.text(".details")
    browser.press("Escape")
    assert browser.text(".details") == "No action chosen."


def test_the_timeline_zooms_and_moves(browser: Browser, pages: Pages) -> None:
    browser.open(pages.one)
    views = [browser.text(".range")]

    def seen() -> str:
        browser.settle()
        views.append(browser.text(".range"))
        return views[-1]

    for word in ("in", "out", "right", "all"):
        browser.js(f"document.querySelector('[data-do={word}]').click()")
        assert seen() != views[-2]
    assert views[-1].startswith("all: ")
    x, y = first_action(browser)
    browser.mouse("mouseWheel", x + 200, y, deltaX=0, deltaY=-120)
    assert seen() == views[-2], "a reader who scrolls the page is not caught"
    x, y = first_action(browser)  # the page has scrolled
    browser.click(x, y)
    browser.mouse("mouseWheel", x + 200, y, deltaX=0, deltaY=-120)
    assert seen() != views[-2]
    before = browser.text(".details")
    browser.mouse("mousePressed", x + 300, y, button="left", clickCount=1)
    for step in range(1, 6):
        browser.mouse("mouseMoved", x + 300 - 20 * step, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 200, y, button="left", clickCount=1)
    assert seen() != views[-2]
    assert browser.text(".details") == before, "a drag is no click"
    assert browser.problems() == []


def test_at_low_zoom_updates_do_not_paint_over_the_rest(browser: Browser, pages: Pages) -> None:
    """Updates take no time here: whatever they are drawn on, forwards and backwards lose."""
    browser.open(pages.long)
    browser.js("document.querySelector('[data-do=all]').click()")
    browser.settle()
    assert browser.text(".range").startswith("all: ")
    shares = browser.js(_COLOURS_DRAWN)
    assert shares["F"] + shares["B"] > 0.5, shares
    assert shares["U"] < 0.25 * (shares["F"] + shares["B"]), shares


def test_runs_can_be_hidden_and_curves_drawn_against_time(browser: Browser, pages: Pages) -> None:
    browser.open(pages.several)
    lines = "document.querySelectorAll('[data-chart=test_accuracy] path').length"
    axis = "document.querySelector('[data-chart=test_accuracy] text.axis').textContent"
    assert (browser.js(lines), browser.js(axis)) == (3, "epoch")
    browser.js("document.querySelector('[data-run=\"1\"]').click()")
    browser.js("document.querySelector('[data-axis=time]').click()")
    assert (browser.js(lines), browser.js(axis)) == (2, "time, s")
    pressed = "document.querySelector('[data-run=\"1\"]').getAttribute('aria-pressed')"
    assert browser.js(pressed) == "false"
    browser.js("document.querySelector('[data-run=\"1\"]').click()")
    assert browser.js(lines) == 3
    assert browser.problems() == []


def test_pointing_at_a_curve_shows_its_values(browser: Browser, pages: Pages) -> None:
    browser.open(pages.several)
    left, top = browser.place_of("[data-chart=test_accuracy] svg")
    browser.mouse("mouseMoved", left + 50, top + 60)
    browser.settle()
    shown = browser.text("[data-chart=test_accuracy] .tip").split()
    assert shown == ["epoch", "1", "stale", "30", "bp", "30", "two", "30"]


def test_the_second_half_leaves_the_first_out(browser: Browser, pages: Pages) -> None:
    browser.open(pages.several)
    dots = "document.querySelectorAll('[data-chart=test_accuracy] circle').length"
    assert browser.js(dots) == 9  # three evaluations of three runs
    browser.js("document.querySelector('[data-part=end]').click()")
    assert browser.js(dots) == 6
    front = "document.querySelectorAll('[data-chart=front] path.front').length"
    assert browser.js(front) == 1


def test_a_wide_table_says_that_it_scrolls_on_a_phone_alone(browser: Browser, pages: Pages) -> None:
    cue = "getComputedStyle(document.querySelector('.side caption > span'), '::after').content"
    for width, wanted in ((400, True), (1400, False)):
        browser.open(pages.several, width=width)
        browser.settle()
        assert ("scroll" in browser.js(cue)) == wanted, width
    assert browser.problems() == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_the_page(browser: Browser, pages: Pages, dark: bool) -> None:
    """WCAG's contrast of at least 4.5, for text and for notes."""
    browser.open(pages.one, dark=dark)

    def luminance(colour: str) -> float:
        shares = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
        light = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
        return float(np.dot(light, (0.2126, 0.7152, 0.0722)))

    paper = luminance(browser.js("getComputedStyle(document.body).backgroundColor"))
    assert (paper < 0.05) == dark
    for selector in ("body", ".note", "nav a", "thead th"):
        ink = luminance(browser.js(f"getComputedStyle(document.querySelector('{selector}')).color"))
        high, low = max(ink, paper), min(ink, paper)
        assert (high + 0.05) / (low + 0.05) >= 4.5, selector
