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

class Chart {
  constructor(figure, runs, state) {
    this.figure = figure;
    this.state = state;
    this.key = figure.dataset.chart;
    this.runs = runs;
    this.svg = element("svg", { role: "img", "aria-label": figure.textContent });
    this.tip = element("div", { class: "tip", hidden: "hidden" });
    figure.append(this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /* Per visible run its [x, y] pairs on the chosen axis. */
  visible() {
    return this.runs
      .map((run, place) => ({ run, place, points: this.pairs(run[this.key]) }))
      .filter(({ place, points }) => !this.state.hidden.has(place) && points.length);
  }

  pairs(columns) {
    const xs = columns[this.state.axis];
    return columns.value.map((y, k) => [xs[k], y]).filter(([x, y]) => x !== null && y !== null);
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
      return;
    }
    const all = shown.flatMap(({ points }) => points);
    const frame = this.frame(all, width, height);
    this.axes(frame);
    for (const { place, points } of shown) this.line(frame, place, points);
    this.cursor = element("line", {
      class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden",
    });
    this.svg.append(this.cursor);
    this.current = frame;
  }

  frame(points, width, height) {
    const range = (values) => {
      const low = values.reduce((a, b) => Math.min(a, b));
      const high = values.reduce((a, b) => Math.max(a, b));
      const room = high > low ? 0.04 * (high - low) : Math.abs(high) * 0.1 || 1;
      return [low - room, high + room];
    };
    const [x0, x1] = range(points.map(([x]) => x));
    const [y0, y1] = range(points.map(([, y]) => y));
    const [left, right, top, bottom] = [46, width - 12, 10, height - 38];
    return {
      left, right, top, bottom, x0, x1, y0, y1,
      x: (value) => left + ((value - x0) / (x1 - x0)) * (right - left),
      y: (value) => bottom - ((value - y0) / (y1 - y0)) * (bottom - top),
    };
  }

  axes(f) {
    const down = ticks(f.y0, f.y1, 7);
    for (const value of down.values) {
      const y = f.y(value);
      this.svg.append(
        element("line", { class: "grid", x1: f.left, x2: f.right, y1: y, y2: y }),
        element("text", { x: f.left - 6, y: y + 4, "text-anchor": "end" },
          value.toFixed(down.digits)));
    }
    const across = ticks(Math.max(0, f.x0), f.x1, Math.max(2, (f.right - f.left) / 70));
    for (const value of across.values) {
      this.svg.append(element("text",
        { x: f.x(value), y: f.bottom + 16, "text-anchor": "middle" },
        value.toFixed(across.digits)));
    }
    const name = this.state.axis === "epoch" ? "epoch" : "time, s";
    this.svg.append(element("text",
      { x: (f.left + f.right) / 2, y: f.bottom + 33, "text-anchor": "middle" }, name));
  }

  line(f, place, points) {
    const colour = `run-${place % COLOURS}`;
    const path = points.map(([x, y]) => `${f.x(x).toFixed(1)},${f.y(y).toFixed(1)}`).join("L");
    this.svg.append(element("path", {
      class: `line ${colour}`, d: `M${path}`, "stroke-dasharray": DASHES[place % DASHES.length],
      // Earlier lines are broader, so that one which a later line covers still shows.
      style: `stroke-width:${Math.max(1.5, 2.6 - 0.3 * place)}`,
    }));
    if (points.length > DOTS_UP_TO) return;
    for (const [x, y] of points) {
      this.svg.append(element("circle", {
        class: `dot ${colour}`, cx: f.x(x).toFixed(1), cy: f.y(y).toFixed(1), r: 3,
      }));
    }
  }

  point(event) {
    const f = this.current;
    const shown = this.visible();
    if (!f || !shown.length) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const wanted = f.x0 + ((at - f.left) / (f.right - f.left)) * (f.x1 - f.x0);
    const nearest = (points) => points.reduce((best, next) =>
      (Math.abs(next[0] - wanted) < Math.abs(best[0] - wanted) ? next : best));
    const nearby = shown.map((one) => ({ ...one, point: nearest(one.points) }));
    const x = nearest(nearby.map(({ point }) => point))[0];
    const px = f.x(x);
    this.cursor.setAttribute("x1", px);
    this.cursor.setAttribute("x2", px);
    this.cursor.setAttribute("visibility", "visible");
    const title = this.state.axis === "epoch" ? `epoch ${short(x)}` : `${short(x)} s`;
    this.tip.replaceChildren(element("div", {}, title), ...nearby.map(({ run, place, point }) =>
      element("div", {},
        element("svg", { class: "swatch", viewBox: "0 0 26 12" }, element("line", {
          class: `line run-${place % COLOURS}`, x1: 1, x2: 25, y1: 6, y2: 6,
          "stroke-dasharray": DASHES[place % DASHES.length],
        })),
        this.runs.length > 1 ? run.label : "",
        element("b", {}, short(point[1])))));
    this.tip.hidden = false;
    const onRight = px > (f.left + f.right) / 2;
    this.tip.style.left = onRight ? "auto" : `${px + 10}px`;
    this.tip.style.right = onRight ? `${this.svg.clientWidth - px + 10}px` : "auto";
  }

  leave() {
    this.tip.hidden = true;
    if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
  }
}

function startCurves(runs) {
  const state = { axis: "epoch", hidden: new Set() };
  const has = (axis) => runs.some((run) =>
    ["training_loss", "test_loss", "test_accuracy"].some((key) =>
      run[key][axis].some((value) => value !== null)));
  const charts = [...document.querySelectorAll("[data-chart]")]
    .map((figure) => new Chart(figure, runs, state));
  const axes = [...document.querySelectorAll("button[data-axis]")];
  const choose = (axis) => {
    state.axis = axis;
    for (const button of axes) button.setAttribute("aria-pressed", button.dataset.axis === axis);
    for (const chart of charts) chart.draw();
  };
  for (const button of axes) {
    button.disabled = !has(button.dataset.axis);
    button.addEventListener("click", () => choose(button.dataset.axis));
  }
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const place = Number(button.dataset.run);
      const hide = !state.hidden.has(place);
      if (hide) state.hidden.add(place); else state.hidden.delete(place);
      button.setAttribute("aria-pressed", !hide);
      for (const chart of charts) chart.draw();
    });
  }
  if (!has("epoch") && has("time")) choose("time");
}
