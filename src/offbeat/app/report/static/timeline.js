/* Timelines: boxes on a canvas, because a run has thousands of them. */

const NAMES = {
  F: "forward", B: "backward", U: "update",
  S: "start of an average", A: "average under way", M: "merge of an average",
};
const AXIS = 22;
/* Below the boxes of a line, where arrows say how late a gradient is. */
const LANE = 18;
const NARROW_UPDATE = 3;
const NARROW_BOX = 0.7;
/* Of the typical box, so that what is drawn too wide never covers the others. */
const NARROW_SHARE = 0.2;
/* Pixels of a typical box in the first view, and how many batches it should show. */
const FIRST_BOX = 26;
const NARROWEST_BOX = 6;
const FIRST_BATCHES = 8;

function time(value, unit) {
  if (!unit) return String(Number(value.toFixed(3)));
  const size = Math.abs(value);
  if (size >= 1 || size === 0) return `${Number(value.toPrecision(4))} s`;
  if (size >= 1e-3) return `${Number((value * 1e3).toPrecision(4))} ms`;
  return `${Number((value * 1e6).toPrecision(4))} µs`;
}

class Timeline {
  constructor(figure, data) {
    this.data = data;
    this.canvas = figure.querySelector("canvas");
    this.range = figure.querySelector(".range");
    this.details = figure.querySelector(".details");
    this.chosen = null;
    this.pointers = new Map();
    this.count = data.start.length;
    const ends = data.start.map((start, k) => start + data.length[k]);
    this.end = ends.reduce((most, end) => Math.max(most, end), 0) || 1;
    this.byLine = data.lines.map(() => []);
    data.line.forEach((line, k) => this.byLine[line].push(k));
    for (const line of this.byLine) line.sort((a, b) => data.start[a] - data.start[b]);
    this.typical = this.byLine.map((line) => this.median(line));
    this.boxHeight = data.lines.length <= 12 ? 26 : data.lines.length <= 32 ? 18 : 12;
    this.lane = data.lines.length <= 12 ? LANE : 0;
    this.lineHeight = this.boxHeight + this.lane;
    this.pairs = this.pairUp();
    this.canvas.style.height = `${AXIS + data.lines.length * this.lineHeight + 4}px`;
    this.listen(figure);
  }

  /* Per line: forwards whose backward is known, each with it, in order. */
  pairUp() {
    const { data } = this;
    return this.byLine.map((line) => {
      const backwards = new Map();
      for (const k of line) if (data.kind[k] === "B") backwards.set(data.batch[k], k);
      return line
        .filter((k) => data.kind[k] === "F" && data.lag[k] !== null && backwards.has(data.batch[k]))
        .map((k) => [k, backwards.get(data.batch[k])]);
    });
  }

  listen(figure) {
    const c = this.canvas;
    for (const button of figure.querySelectorAll("button[data-do]")) {
      button.addEventListener("click", () => this.act(button.dataset.do));
    }
    c.addEventListener("pointerdown", (event) => this.down(event));
    c.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) {
      c.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    c.addEventListener("click", (event) => {
      if (!this.dragged) this.choose(this.at(event.offsetX, event.offsetY));
    });
    c.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    c.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(c);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /* ---------------------------------------------------------------- view */

  resize() {
    const c = this.canvas;
    const scale = window.devicePixelRatio || 1;
    this.width = c.clientWidth;
    this.height = c.clientHeight;
    if (!this.width) return;
    c.width = Math.round(this.width * scale);
    c.height = Math.round(this.height * scale);
    this.pen = c.getContext("2d");
    this.pen.scale(scale, scale);
    this.pen.font = "12px system-ui, sans-serif";
    const widest = Math.max(...this.data.lines.map((name) => this.pen.measureText(name).width));
    this.gutter = Math.ceil(widest) + 10;
    this.plot = Math.max(1, this.width - this.gutter - 4);
    if (this.from === undefined) this.first();
    this.draw();
  }

  /* How long a forward or backward among these actions takes. */
  median(actions) {
    const boxes = actions.filter((k) => this.data.length[k] > 0 && "FB".includes(this.data.kind[k]));
    const lengths = boxes.map((k) => this.data.length[k]).sort((a, b) => a - b);
    return lengths[Math.floor(lengths.length / 2)] || this.end;
  }

  /* At first boxes are wide enough for their numbers, unless that would show too few batches. Where
     a slow start would push every batch with its whole lag out of view, it is left out of it. */
  first() {
    const { data } = this;
    const typical = this.median(data.start.map((_, k) => k));
    const forwards = (this.byLine[0] || []).filter((k) => data.kind[k] === "F");
    const end = (place) => {
      const k = forwards[Math.min(place, forwards.length) - 1];
      return k === undefined ? 0 : data.start[k] + data.length[k];
    };
    const fit = (enough) => Math.min(this.end,
      Math.max((typical * this.plot) / FIRST_BOX, enough), (typical * this.plot) / NARROWEST_BOX);
    const late = this.latest();
    if (!late || data.start[late[0]] + 2 * typical < fit(end(FIRST_BATCHES))) {
      this.view(0, fit(end(FIRST_BATCHES)));
      return;
    }
    const from = data.start[late[0]];
    const enough = end(forwards.indexOf(late[0]) + FIRST_BATCHES) - from;
    this.view(from - 0.5 * typical, fit(enough));
  }

  /* The first line's forward and backward that are the first to be as late as any there. */
  latest(from = 0) {
    const pairs = this.pairs[0] || [];
    const most = pairs.reduce((lag, [k]) => Math.max(lag, this.data.lag[k]), 0);
    return pairs.find(([k]) => this.data.lag[k] === most && this.data.start[k] >= from);
  }

  view(from, span) {
    this.span = Math.min(this.end * 1.02, Math.max(this.end * 1e-6, span));
    this.from = Math.min(Math.max(0, from), Math.max(0, this.end * 1.02 - this.span));
    if (!this.waiting) {
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.draw(); });
    }
  }

  zoom(factor, px = this.gutter + this.plot / 2) {
    const at = this.from + ((px - this.gutter) / this.plot) * this.span;
    const span = Math.min(this.end * 1.02, Math.max(this.end * 1e-6, this.span / factor));
    this.view(at - ((px - this.gutter) / this.plot) * span, span);
  }

  x(value) {
    return this.gutter + ((value - this.from) / this.span) * this.plot;
  }

  /* ---------------------------------------------------------------- drawing */

  draw() {
    if (!this.pen || !this.width) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(
      ["ink", "soft", "rule", "paper", "F", "B", "U", "A", "in-box"].map((n) => [n, colour(n)]));
    this.pen.clearRect(0, 0, this.width, this.height);
    this.drawAxis();
    this.byLine.forEach((line, place) => this.drawLine(line, place));
    if (this.lane) this.drawArrows();
    const words = (value) => time(value, this.data.unit);
    const whole = this.span >= this.end;
    this.range.textContent = whole
      ? `all: ${words(this.end)}`
      : `${words(this.from)} to ${words(this.from + this.span)} of ${words(this.end)}`;
  }

  drawAxis() {
    const { pen, colours } = this;
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    const marks = ticks(this.from, this.from + this.span, Math.max(2, this.plot / 90));
    for (const value of marks.values) {
      const x = this.x(value);
      pen.fillStyle = colours.rule;
      pen.fillRect(x, AXIS - 5, 1, this.height - AXIS + 5);
      pen.fillStyle = colours.soft;
      const label = time(Number(value.toFixed(9)), this.data.unit);
      const half = pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(Math.max(x, this.gutter + half), this.width - half), AXIS - 9);
    }
  }

  drawLine(line, place) {
    const { pen, colours, data } = this;
    const top = AXIS + place * this.lineHeight;
    pen.fillStyle = colours.ink;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(data.lines[place], 0, top + this.boxHeight / 2);
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.plot + 4, this.height);
    pen.clip();
    pen.textAlign = "center";
    // Updates last: they are narrow, and a neighbour must not cover them.
    const visible = line.filter((k) =>
      data.start[k] + data.length[k] >= this.from && data.start[k] <= this.from + this.span);
    for (const narrow of [false, true]) {
      for (const k of visible) if ((data.kind[k] === "U") === narrow) this.drawBox(k, top);
    }
    pen.restore();
  }

  drawBox(k, top) {
    const { pen, colours, data } = this;
    const kind = data.kind[k];
    const [left, right] = this.edges(k);
    const inset = kind === "A" ? this.boxHeight * 0.3 : 2;
    const height = this.boxHeight - 2 * inset;
    pen.globalAlpha = this.dimmed(k) ? 0.3 : 1;
    pen.fillStyle = colours["FBU".includes(kind) ? kind : "A"];
    const gap = right - left > 4 && kind !== "U" ? 1 : 0;
    pen.fillRect(left, top + inset, right - left - gap, height);
    pen.fillStyle = colours["in-box"];
    const room = right - left - 4;
    const texts = this.boxHeight > 14 && "FB".includes(kind)
      ? [`${kind}${data.batch[k]}`, String(data.batch[k])] : [];
    const text = texts.find((t) => pen.measureText(t).width <= room);
    if (text) pen.fillText(text, (left + right - gap) / 2, top + this.boxHeight / 2 + 0.5);
    pen.globalAlpha = 1;
    if (k === this.chosen) {
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left, top + inset, Math.max(2, right - left - gap), height);
    }
  }

  /* One batch, so that arrows never cross: the chosen one, or the first with its line's whole lag
     that has its forward in view. */
  shownBatch() {
    const { data, chosen } = this;
    if (chosen !== null) {
      return "FB".includes(data.kind[chosen]) ? [data.batch[chosen], data.replica[chosen]] : null;
    }
    const first = this.latest(this.from);
    return first && data.start[first[0]] <= this.from + this.span
      ? [data.batch[first[0]], data.replica[first[0]]] : null;
  }

  drawArrows() {
    const shown = this.shownBatch();
    if (!shown) return;
    const { data, pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.plot + 4, this.height);
    pen.clip();
    this.pairs.forEach((pairs, place) => {
      const pair = pairs.find(([k]) => data.batch[k] === shown[0] && data.replica[k] === shown[1]);
      if (pair) this.drawArrow(...pair, AXIS + place * this.lineHeight + this.boxHeight - 2);
    });
    pen.restore();
  }

  drawArrow(forward, backward, top) {
    const { pen, data, colours } = this;
    const middle = (k) => this.edges(k).reduce((a, b) => a + b) / 2;
    const [from, to, y] = [middle(forward), middle(backward), top + LANE / 2];
    const [left, right] = [Math.max(from, this.gutter), Math.min(to, this.gutter + this.plot)];
    if (right <= left) return;
    const name = `F${data.batch[forward]} to B${data.batch[backward]}`;
    const lag = data.lag[forward];
    const late = lag === 0 ? "on time" : `${lag} ${lag === 1 ? "update" : "updates"} late`;
    pen.font = "11px system-ui, sans-serif";
    const text = [`${name}: ${late}`, late].find((t) => pen.measureText(t).width + 16 < right - left);
    const half = text ? pen.measureText(text).width / 2 + 4 : 0;
    const centre = (left + right) / 2;
    pen.strokeStyle = pen.fillStyle = colours.ink;
    pen.lineWidth = 1.2;
    pen.beginPath();
    pen.moveTo(from, top);
    pen.lineTo(from, y);
    pen.lineTo(text ? centre - half : to, y);
    if (text) pen.moveTo(centre + half, y);
    pen.lineTo(to, y);
    pen.lineTo(to, top + 3);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(to, top);
    pen.lineTo(to - 3.5, top + 6);
    pen.lineTo(to + 3.5, top + 6);
    pen.fill();
    if (text) {
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(text, centre, y + 0.5);
    }
    pen.font = "12px system-ui, sans-serif";
  }

  /* With an action chosen, its micro-batch stands out on its way through all stages. */
  dimmed(k) {
    if (this.chosen === null || k === this.chosen) return false;
    const { data, chosen } = this;
    const pair = "FB".includes(data.kind[chosen]) && "FB".includes(data.kind[k]);
    return !(pair && data.batch[k] === data.batch[chosen]
      && data.replica[k] === data.replica[chosen]);
  }

  edges(k) {
    const left = this.x(this.data.start[k]);
    const right = this.x(this.data.start[k] + this.data.length[k]);
    const narrow = this.data.kind[k] === "U" ? NARROW_UPDATE : NARROW_BOX;
    const typical = (this.typical[this.data.line[k]] / this.span) * this.plot;
    const least = Math.min(narrow, NARROW_SHARE * typical);
    if (right - left >= least) return [left, right];
    return this.data.kind[k] === "U"
      ? [(left + right - least) / 2, (left + right + least) / 2] : [left, left + least];
  }

  /* ---------------------------------------------------------------- choosing */

  at(px, py) {
    const line = this.byLine[Math.floor((py - AXIS) / this.lineHeight)];
    if (!line || px < this.gutter) return null;
    let best = null;
    for (const k of line) {
      const [left, right] = this.edges(k);
      const away = Math.max(left - px, px - right, 0);
      const better = best === null || away < best.away
        || (away === best.away && right - left < best.width);
      if (away <= 3 && better) best = { k, away, width: right - left };
    }
    return best && best.k;
  }

  choose(k) {
    this.chosen = k;
    const facts = k === null ? [] : this.describe(k);
    if (facts.length) {
      const list = element("dl");
      for (const [name, value] of facts) {
        list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
      }
      this.details.replaceChildren(list);
    } else {
      this.details.textContent = "No action chosen.";
    }
    this.draw();
  }

  describe(k) {
    const d = this.data;
    const kind = d.kind[k];
    const facts = [
      ["action", `${NAMES[kind]} (${d.stage[k]}${kind}${d.batch[k]})`],
      ["stage", String(d.stage[k])],
      ["replica", String(d.replica[k])],
      [{ F: "batch", B: "batch", U: "update" }[kind] || "average", String(d.batch[k])],
    ];
    if (kind === "F") facts.push(["version read", String(d.version[k])]);
    if (kind === "B") {
      facts.push(["version its forward read", d.read[k] === null ? "unknown" : String(d.read[k])]);
      facts.push(["newest version", String(d.version[k])]);
    }
    if (kind === "U") facts.push(["version written", String(d.version[k])]);
    if (!"FBU".includes(kind)) facts.push(["version", String(d.version[k])]);
    if ("FB".includes(kind)) {
      const updates = d.lag[k] === 1 ? "update" : "updates";
      facts.push(["lag", d.lag[k] === null ? "unknown" : `${d.lag[k]} ${updates}`]);
    }
    facts.push(["start", time(d.start[k], d.unit)], ["duration", time(d.length[k], d.unit)]);
    if (d.loss[k] !== null) facts.push(["loss", short(d.loss[k])]);
    return facts;
  }

  /* ---------------------------------------------------------------- input */

  act(word) {
    if (word === "in") this.zoom(1.6);
    if (word === "out") this.zoom(1 / 1.6);
    if (word === "left") this.view(this.from - 0.4 * this.span, this.span);
    if (word === "right") this.view(this.from + 0.4 * this.span, this.span);
    if (word === "all") this.view(0, this.end * 1.02);
  }

  down(event) {
    if (!this.pointers.size) this.dragged = false;
    this.pointers.set(event.pointerId, { x: event.offsetX, first: event.offsetX });
  }

  move(event) {
    const own = this.pointers.get(event.pointerId);
    if (!own) return;
    const before = [...this.pointers.values()].map(({ x }) => x);
    const last = own.x;
    own.x = event.offsetX;
    if (Math.abs(own.x - own.first) > 5 || this.pointers.size > 1) {
      if (!this.dragged) this.canvas.setPointerCapture(event.pointerId);
      this.dragged = true;
    }
    if (!this.dragged) return;
    if (this.pointers.size === 1) {
      this.view(this.from - ((own.x - last) / this.plot) * this.span, this.span);
    } else {
      const after = [...this.pointers.values()].map(({ x }) => x);
      const apart = (xs) => Math.max(20, Math.abs(xs[0] - xs[1]));
      this.zoom(apart(after) / apart(before), (after[0] + after[1]) / 2);
    }
  }

  /* Without this rule a reader who scrolls the page would be caught by the first timeline. */
  wheel(event) {
    if (!event.ctrlKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.view(this.from + (event.deltaX / this.plot) * this.span, this.span);
    } else {
      this.zoom(Math.exp(-Math.max(-100, Math.min(100, event.deltaY)) / 250), event.offsetX);
    }
  }

  key(event) {
    const zooms = { "+": 1.6, "=": 1.6, "-": 1 / 1.6 };
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (zooms[event.key]) this.zoom(zooms[event.key]);
    else if (steps[event.key]) this.step(...steps[event.key]);
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }

  step(along, across) {
    if (!this.count) return;
    if (this.chosen === null) {
      this.reveal(this.byLine[0][0]);
      return;
    }
    const place = this.data.line[this.chosen];
    if (along) {
      const line = this.byLine[place];
      const next = line[line.indexOf(this.chosen) + along];
      if (next !== undefined) this.reveal(next);
      return;
    }
    const line = this.byLine[place + across];
    if (!line) return;
    const start = this.data.start[this.chosen];
    const away = (k) => Math.abs(this.data.start[k] - start);
    this.reveal(line.reduce((best, k) => (away(k) < away(best) ? k : best)));
  }

  reveal(k) {
    const start = this.data.start[k];
    const out = start < this.from || start + this.data.length[k] > this.from + this.span;
    if (out) this.view(start - this.span / 2, this.span);
    this.choose(k);
  }
}

function startTimelines(timelines) {
  for (const figure of document.querySelectorAll("[data-timeline]")) {
    new Timeline(figure, timelines[Number(figure.dataset.timeline)]);
  }
}
