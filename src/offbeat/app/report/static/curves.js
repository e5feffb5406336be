"use strict";

/* Curves: SVG drawn from columns of numbers. Text only ever enters as textContent. */

const DASHES = ["", "7 4", "8 3 2 3", "2 3"];
const COLOURS = 7;
const DOTS_UP_TO = 40;

function element(name, attributes, ...children) {
  const svg = ["svg", "path", "line", "text", "circle", "g"].includes(name);
  const node = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== "") node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

/* Round numbers that divide a range into about so many parts. */
function ticks(low, high, about) {
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) {
    values.push(k * step);
  }
  return { values, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function short(value) {
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) {
    return value.toExponential(2);
  }
  return String(Number(value.toPrecision(4)));
}

const MOST_END_LABELS = 4;
/* A loss that falls by more than this is drawn on a log scale, and the title says so. */
const LOG_FROM = 20;

class Chart {
  constructor(figure, cases, front, state) {
    this.figure = figure;
    this.state = state;
    this.front = figure.dataset.chart === "front" ? front : null;
    this.key = this.front ? front.key : figure.dataset.chart;
    this.cases = cases;
    this.caption = figure.querySelector("figcaption");
    this.svg = element("svg", { role: "img", "aria-label": this.caption.textContent });
    this.unsaid = element("span", { class: "note" });
    this.caption.append(this.unsaid);
    this.tip = element("div", { class: "tip", hidden: "hidden" });
    figure.append(this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  get axis() {
    return this.front ? "time" : this.state.axis;
  }

  /* Per visible configuration its points on the chosen axis, in the chosen part of the run. */
  visible() {
    const shown = this.cases
      .map((one, place) => ({ one, place, points: this.points(one[this.key]) }))
      .filter(({ place, points }) => !this.state.hidden.has(place) && points.length);
    if (this.state.part !== "end") return shown;
    const xs = shown.flatMap(({ points }) => points.map(({ x }) => x));
    const middle = (Math.min(...xs) + Math.max(...xs)) / 2;
    return shown
      .map((each) => ({ ...each, points: each.points.filter(({ x }) => x >= middle) }))
      .filter(({ points }) => points.length);
  }

  points(columns) {
    const xs = columns[this.axis];
    const { value, low, high, count } = columns;
    return value
      .map((y, k) => ({ x: xs[k], y, low: low && low[k], high: high && high[k], n: count && count[k] }))
      .filter(({ x, y }) => x !== null && y !== null);
  }

  draw() {
    this.leave();
    const shown = this.visible();
    this.svg.replaceChildren();
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width) return;
    if (!shown.length) {
      const words = this.state.hidden.size ? "every run with values is hidden" : "no values";
      this.svg.append(element("text", { x: 8, y: 24 }, words));
      this.current = null;
      return;
    }
    const frame = this.frame(shown, width, height);
    this.unsaid.textContent = frame.log ? " (log scale)" : "";
    this.axes(frame);
    if (this.front) {
      for (const { place, points } of shown) this.dots(frame, place, points);
      this.steps(frame, shown);
    } else {
      for (const { place, points } of shown) this.band(frame, place, points);
      for (const { place, points } of shown) this.line(frame, place, points);
      this.ends(frame, shown);
    }
    this.cursor = element("line", {
      class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden",
    });
    this.svg.append(this.cursor);
    this.current = frame;
  }

  frame(shown, width, height) {
    const all = shown.flatMap(({ points }) => points);
    const range = (values) => {
      const low = values.reduce((a, b) => Math.min(a, b));
      const high = values.reduce((a, b) => Math.max(a, b));
      const room = high > low ? 0.04 * (high - low) : Math.abs(high) * 0.1 || 1;
      return [low - room, high + room];
    };
    const [x0, x1] = range(all.map(({ x }) => x));
    const ys = all.flatMap(({ y, low, high }) => [y, low ?? y, high ?? y]);
    const least = Math.min(...ys);
    const log = this.key.endsWith("loss") && least > 0 && Math.max(...ys) > LOG_FROM * least;
    const scale = log ? Math.log10 : (value) => value;
    const [y0, y1] = range(ys.map(scale));
    const labels = !this.front && shown.length <= MOST_END_LABELS;
    const [left, right, top, bottom] = [46, width - (labels ? 46 : 12), 10, height - 38];
    return {
      left, right, top, bottom, x0, x1, y0, y1, log, labels,
      x: (value) => left + ((value - x0) / (x1 - x0)) * (right - left),
      y: (value) => bottom - ((scale(value) - y0) / (y1 - y0)) * (bottom - top),
    };
  }

  /* On a log scale 1, 2 and 5 of every power of ten, as far as they have room. */
  marks(f) {
    if (!f.log) {
      const down = ticks(f.y0, f.y1, 7);
      return down.values.map((value) => [value, value.toFixed(down.digits)]);
    }
    const values = [];
    for (let power = Math.floor(f.y0); power <= f.y1; power += 1) {
      for (const k of f.y1 - f.y0 > 2.5 ? [1] : [1, 2, 5]) values.push(k * 10 ** power);
    }
    return values
      .filter((value) => Math.log10(value) >= f.y0 && Math.log10(value) <= f.y1)
      .map((value) => [value, short(value)]);
  }

  axes(f) {
    for (const [value, label] of this.marks(f)) {
      const y = f.y(value);
      this.svg.append(
        element("line", { class: "grid", x1: f.left, x2: f.right, y1: y, y2: y }),
        element("text", { x: f.left - 6, y: y + 4, "text-anchor": "end" }, label));
    }
    const across = ticks(Math.max(0, f.x0), f.x1, Math.max(2, (f.right - f.left) / 70));
    for (const value of across.values) {
      this.svg.append(element("text",
        { x: f.x(value), y: f.bottom + 16, "text-anchor": "middle" },
        value.toFixed(across.digits)));
    }
    const name = this.axis === "epoch" ? "epoch" : "time, s";
    this.svg.append(element("text",
      { x: (f.left + f.right) / 2, y: f.bottom + 33, "text-anchor": "middle", class: "axis" }, name));
  }

  band(f, place, points) {
    if (!points.some(({ n }) => n > 1)) return;
    const at = (x, y) => `${f.x(x).toFixed(1)},${f.y(y).toFixed(1)}`;
    const upper = points.map(({ x, high }) => at(x, high));
    const lower = points.map(({ x, low }) => at(x, low)).reverse();
    this.svg.append(element("path", {
      class: `band run-${place % COLOURS}`, d: `M${[...upper, ...lower].join("L")}Z`,
    }));
  }

  line(f, place, points) {
    const colour = `run-${place % COLOURS}`;
    const path = points.map(({ x, y }) => `${f.x(x).toFixed(1)},${f.y(y).toFixed(1)}`).join("L");
    this.svg.append(element("path", {
      class: `line ${colour}`, d: `M${path}`, "stroke-dasharray": DASHES[place % DASHES.length],
      // Earlier lines are broader, so that one which a later line covers still shows.
      style: `stroke-width:${Math.max(1.5, 2.6 - 0.3 * place)}`,
    }));
    if (points.length <= DOTS_UP_TO) this.dots(f, place, points);
  }

  dots(f, place, points) {
    for (const { x, y } of points) {
      this.svg.append(element("circle", {
        class: `dot run-${place % COLOURS}`, cx: f.x(x).toFixed(1), cy: f.y(y).toFixed(1), r: 3,
      }));
    }
  }

  /* The last value of each line, beside its end; none is written over another. */
  ends(f, shown) {
    if (!f.labels) return;
    const ends = shown
      .map(({ points }) => points[points.length - 1])
      // The value of a line that ends earlier would stand on those that go on.
      .filter(({ x }) => f.x(x) > f.right - 24)
      .map(({ x, y }) => ({ px: f.x(x) + 6, py: f.y(y) + 4, text: short(y) }))
      .sort((a, b) => a.py - b.py);
    let last = -Infinity;
    for (const { px, py, text } of ends) {
      const y = Math.max(py, last + 13);
      last = y;
      this.svg.append(element("text", { class: "end", x: px, y: Math.min(y, f.bottom + 4) }, text));
    }
  }

  /* The best so far, of those that are shown: it goes on to the right, and steps where passed. */
  steps(f, shown) {
    const up = this.key === "test_accuracy";
    const all = shown
      .flatMap(({ place, points }) => points.map((point) => ({ ...point, place })))
      .sort((a, b) => a.x - b.x || (up ? b.y - a.y : a.y - b.y));
    let best = null;
    let path = "";
    for (const point of all) {
      if (best !== null && (up ? point.y <= best.y : point.y >= best.y)) continue;
      const [x, y] = [f.x(point.x).toFixed(1), f.y(point.y).toFixed(1)];
      path += best === null ? `M${x},${y}` : `H${x}V${y}`;
      this.svg.append(element("circle", {
        class: `holder run-${point.place % COLOURS}`, cx: x, cy: y, r: 6,
      }));
      best = point;
    }
    this.svg.append(element("path", { class: "front", d: `${path}H${f.right}` }));
  }

  point(event) {
    const f = this.current;
    const shown = this.visible();
    if (!f || !shown.length) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const wanted = f.x0 + ((at - f.left) / (f.right - f.left)) * (f.x1 - f.x0);
    const nearest = (points) => points.reduce((best, next) =>
      (Math.abs(next.x - wanted) < Math.abs(best.x - wanted) ? next : best));
    const nearby = shown.map((each) => ({ ...each, point: nearest(each.points) }));
    const x = nearest(nearby.map(({ point }) => point)).x;
    const px = f.x(x);
    this.cursor.setAttribute("x1", px);
    this.cursor.setAttribute("x2", px);
    this.cursor.setAttribute("visibility", "visible");
    const title = this.axis === "epoch" ? `epoch ${short(x)}` : `${short(x)} s`;
    this.tip.replaceChildren(element("div", {}, title), ...nearby.map(({ one, place, point }) =>
      element("div", {},
        element("svg", { class: "swatch", viewBox: "0 0 26 12" }, element("line", {
          class: `line run-${place % COLOURS}`, x1: 1, x2: 25, y1: 6, y2: 6,
          "stroke-dasharray": DASHES[place % DASHES.length],
        })),
        this.cases.length > 1 ? one.label : "",
        element("b", {}, this.value(one, point)))));
    this.tip.hidden = false;
    const onRight = px > (f.left + f.right) / 2;
    this.tip.style.left = onRight ? "auto" : `${px + 10}px`;
    this.tip.style.right = onRight ? `${this.svg.clientWidth - px + 10}px` : "auto";
  }

  value(one, { y, low, high, n }) {
    if (!(n > 1)) return n && n < one.runs ? `${short(y)} (1 of ${one.runs} runs)` : short(y);
    const of = n < one.runs ? ` of ${n} runs` : "";
    return `${short(y)} (${short(low)} to ${short(high)}${of})`;
  }

  leave() {
    this.tip.hidden = true;
    if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
  }
}

/* What a reader has chosen outlives a page that loads itself again. */
const CHOICES = "offbeat report";

function choices() {
  try {
    return JSON.parse(sessionStorage.getItem(CHOICES)) || {};
  } catch {
    return {};
  }
}

function keep(choice) {
  try {
    sessionStorage.setItem(CHOICES, JSON.stringify({ ...choices(), ...choice }));
  } catch {
    /* A browser that stores nothing forgets. */
  }
}

function startCurves(cases, front) {
  const state = { axis: "epoch", part: "all", hidden: new Set() };
  const has = (axis) => cases.some((one) =>
    ["training_loss", "test_loss", "test_accuracy"].some((key) =>
      one[key][axis].some((value) => value !== null)));
  const charts = [...document.querySelectorAll("[data-chart]")]
    .map((figure) => new Chart(figure, cases, front, state));
  const redraw = () => { for (const chart of charts) chart.draw(); };
  for (const word of ["axis", "part"]) {
    const buttons = [...document.querySelectorAll(`button[data-${word}]`)];
    const choose = (value) => {
      state[word] = value;
      for (const button of buttons) button.setAttribute("aria-pressed", button.dataset[word] === value);
      redraw();
    };
    for (const button of buttons) {
      const value = button.dataset[word];
      button.disabled = word === "axis" && !has(value);
      button.addEventListener("click", () => { choose(value); keep({ [word]: value }); });
    }
    const kept = document.documentElement.dataset.live ? choices()[word] : undefined;
    if (buttons.some((button) => button.dataset[word] === kept && !button.disabled)) choose(kept);
    else if (word === "axis" && !has("epoch") && has("time")) choose("time");
  }
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const place = Number(button.dataset.run);
      const hide = !state.hidden.has(place);
      if (hide) state.hidden.add(place); else state.hidden.delete(place);
      button.setAttribute("aria-pressed", !hide);
      redraw();
    });
  }
}
