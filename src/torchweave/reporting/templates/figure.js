// One diagnosis's lanes: the rows, the part of time that is in view, and their drawing.

const AXIS = 30;
const LEAST_VIEW_NS = 20;

class Figure {
  constructor(root, data) {
    this.root = root;
    this.canvas = root.querySelector(".canvas");
    this.range = root.querySelector(".range");
    this.details = root.querySelector(".details");
    this.id = root.dataset.lanes;
    this.names = data.names;
    this.sides = data.sides;
    this.span = Math.max(data.span, 1);
    this.lanes = data.lanes.map(decodeLane);
    this.both = decodeTimes(data.both);
    this.causes = data.causes.map((cause) => ({
      mark: cause.mark,
      name: cause.name,
      lost: decodeTimes(cause.lost),
      idle: decodeTimes(cause.idle),
    }));
    this.selected = -1;
    this.chosenLane = -1;
    this.chosen = null;
    this.zoomRange = null;
    this.pending = false;
    this.rows = this.layOut();
    this.begin = 0;
    this.end = this.span;
    this.width = this.canvas.clientWidth;
    this.svg = svgElement("svg", {});
    this.canvas.append(this.svg);
  }

  layOut() {
    const rows = [];
    let top = AXIS;
    const add = (row, height, gap) => {
      rows.push({ ...row, top, height });
      top += height + gap;
    };
    if (this.sides.length) add({ kind: "both", label: "both sides ran" }, 12, 5);
    this.causes.forEach((cause, index) => add({ kind: "cause", index, label: `${cause.mark} ${cause.name}` }, 12, 4));
    top += 6;
    this.laneTop = top - 3;
    const devices = new Set(this.lanes.map((lane) => lane.device));
    const height = this.lanes.length > 12 ? 18 : this.lanes.length > 5 ? 26 : 36;
    this.lanes.forEach((lane, index) => {
      const label = devices.size > 1 ? `GPU ${lane.device} stream ${lane.stream}` : `stream ${lane.stream}`;
      add({ kind: "lane", index, label, side: this.sideOf(lane) }, height, 5);
    });
    this.height = top + 4;
    return rows;
  }

  // The name of the side that a lane is on, where it is on one only.
  sideOf(lane) {
    const side = lane.size ? lane.side[0] : 0;
    return side && lane.side.every((other) => other === side) ? this.sides[side - 1] : "";
  }

  // The room for the rows' names.
  get gutter() {
    return this.width < 800 ? 128 : 176;
  }

  get scale() {
    const width = Math.max(Math.floor(this.width - this.gutter - 8), 50);
    return { begin: this.begin, end: this.end, width, perNs: width / (this.end - this.begin) };
  }

  timeAt(x) {
    return this.begin + (x - this.gutter) / this.scale.perNs;
  }

  show(begin, end) {
    const length = Math.min(Math.max(end - begin, LEAST_VIEW_NS), this.span);
    const middle = (begin + end) / 2;
    this.begin = Math.min(Math.max(middle - length / 2, 0), this.span - length);
    this.end = this.begin + length;
    this.draw();
  }

  fit() {
    this.show(0, this.span);
  }

  zoom(factor, at = (this.begin + this.end) / 2) {
    const length = Math.min(Math.max((this.end - this.begin) * factor, LEAST_VIEW_NS), this.span);
    const begin = at - ((at - this.begin) / (this.end - this.begin)) * length;
    this.show(begin, begin + length);
  }

  pan(share) {
    const step = share * (this.end - this.begin);
    this.show(this.begin + step, this.end + step);
  }

  select(index) {
    this.selected = index;
    this.draw();
  }

  // Draws at the next frame, once, however often it is asked.
  draw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.drawNow();
    });
  }

  drawNow() {
    this.width = this.canvas.clientWidth;
    const scale = this.scale;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const clip = `${this.id}-clip`;
    const time = svgElement("g", { transform: `translate(${this.gutter} 0)`, "clip-path": `url(#${clip})` });
    const labels = svgElement("g", {});
    this.svg.replaceChildren(this.patterns(clip, scale), labels, time);
    this.drawAxis(time, scale);
    const lanes = this.rows.filter((row) => row.kind === "lane");
    for (const row of this.rows) if (row.kind !== "lane") this.drawMoments(row, labels, time, scale);
    for (const row of lanes) this.drawBackground(row, labels, time, scale);
    this.drawBands(time, scale);
    for (const row of lanes) {
      time.append(drawLane(this.lanes[row.index], this.names, row, scale, this.fills()));
    }
    this.drawChosen(time, scale);
    this.drawOverview(scale);
    this.range.textContent =
      `${formatMs(this.begin, 3)} to ${formatMs(this.end, 3)} of ${formatMs(this.span, 3)} ms`;
  }

  patterns(clip, scale) {
    const defs = svgElement("defs", {});
    const add = (name, size, parts, transform) => {
      const pattern = { id: `${this.id}-${name}`, width: size, height: size, patternUnits: "userSpaceOnUse" };
      if (transform) pattern.patternTransform = transform;
      const element = svgElement("pattern", pattern);
      parts.forEach(([shape, attributes]) => element.append(svgElement(shape, attributes)));
      defs.append(element);
    };
    const ground = (size, fill) => ["rect", { width: size, height: size, style: `fill: var(${fill})` }];
    add("side2", 6, [ground(6, "--side2"), ["rect", { width: 1, height: 6, style: "fill: var(--side2-line)" }]],
      "rotate(45)");
    add("side0", 5, [ground(5, "--side0"), ["circle", { cx: 2, cy: 2, r: 0.9, style: "fill: var(--side0-line)" }]]);
    add("idle", 5, [["rect", { width: 3, height: 5, style: "fill: var(--idle)" }]]);
    const path = svgElement("clipPath", { id: clip });
    path.append(svgElement("rect", { x: 0, y: 0, width: scale.width, height: this.height }));
    defs.append(path);
    return defs;
  }

  fills() {
    return [
      { class: "op0", fill: `url(#${this.id}-side0)` },
      { class: "op1" },
      { class: "op2", fill: `url(#${this.id}-side2)` },
    ];
  }

  drawAxis(time, scale) {
    for (const { x, text } of ticks(scale)) {
      time.append(svgElement("line", { class: "tick", x1: round(x), x2: round(x), y1: 12, y2: this.height }));
      const anchor = x < 24 ? "start" : x > scale.width - 24 ? "end" : "middle";
      time.append(svgElement("text", { class: "tick-label", x: round(x), y: 22, "text-anchor": anchor }, text));
    }
    this.svg.append(svgElement("text", { class: "tick-label", x: 8, y: 22 }, "ms"));
  }

  drawBackground(row, labels, time, scale) {
    const chosen = row.index === this.chosenLane ? " chosen" : "";
    const back = { class: `lane${chosen}`, x: 0, y: row.top, width: scale.width, height: row.height };
    time.append(svgElement("rect", back));
    if (row.side && row.side !== row.label && row.height >= 24) {
      const middle = row.top + row.height / 2;
      labels.append(label(row.label, row, this.gutter, -2), svgElement("text", { class: "sublabel", x: 8, y: middle + 11 }, row.side));
    } else labels.append(label(row.label, row, this.gutter));
  }

  drawMoments(row, labels, time, scale) {
    if (row.kind === "both") {
      const [path] = momentsPaths([this.both], scale, row.top, row.height);
      time.append(svgElement("path", { class: "both-ran", d: path }));
      labels.append(label(row.label, row, this.gutter));
      return;
    }
    const state = this.selected < 0 ? "" : this.selected === row.index ? " selected" : " dimmed";
    const cause = this.causes[row.index];
    const group = svgElement("g", { class: `cause-row${state}` });
    group.append(svgElement("rect", { class: "lane", x: 0, y: row.top, width: scale.width, height: row.height }));
    const charges = svgElement("g", { class: "charges" });
    const [lost, idle] = momentsPaths([cause.lost, cause.idle], scale, row.top, row.height);
    charges.append(svgElement("path", { class: "charge-lost", d: lost }));
    charges.append(svgElement("path", { class: "charge-idle", fill: `url(#${this.id}-idle)`, d: idle }));
    group.append(charges);
    time.append(group);
    const name = svgElement("g", { class: `cause-row${state}` });
    name.append(label(row.label, row, this.gutter));
    labels.append(name);
  }

  // The selected cause's moments, behind the operations of all lanes: they fill the gaps that it is charged with.
  drawBands(time, scale) {
    if (this.selected < 0) return;
    const cause = this.causes[this.selected];
    const [top, height] = [this.laneTop, this.height - this.laneTop];
    time.append(drawBand(cause.lost, scale, top, height, { class: "band-lost" }));
    time.append(drawBand(cause.idle, scale, top, height, { class: "band-idle", fill: `url(#${this.id}-idle)` }));
  }

  drawChosen(time, scale) {
    if (this.zoomRange) {
      const [a, b] = this.zoomRange.map((at) => (at - scale.begin) * scale.perNs).sort((x, y) => x - y);
      time.append(svgElement("rect", { class: "zoom-range", x: a, y: 0, width: b - a, height: this.height }));
    }
    if (!this.chosen) return;
    const { lane, row } = this.chosen;
    const place = this.rows.find((item) => item.kind === "lane" && item.index === lane);
    const left = (this.lanes[lane].begin[row] - scale.begin) * scale.perNs;
    const right = (this.lanes[lane].end[row] - scale.begin) * scale.perNs;
    const width = Math.max(right - left, 3);
    const frame = { class: "chosen-op", x: left - 1, y: place.top - 1, width: width + 2, height: place.height + 2 };
    time.append(svgElement("rect", frame));
  }

  drawOverview(scale) {
    const at = { x: this.gutter, y: 3, width: scale.width, height: 6, rx: 3, class: "overview" };
    const view = {
      ...at,
      class: "overview-view",
      x: this.gutter + (this.begin / this.span) * scale.width,
      width: Math.max(((this.end - this.begin) / this.span) * scale.width, 3),
    };
    this.svg.append(svgElement("rect", at), svgElement("rect", view));
  }
}

function label(text, row, gutter, y = 4) {
  const shown = fitText(text, gutter - 14, `bold 11px ${FONTS}`);
  const element = svgElement("text", { class: "label", x: 8, y: row.top + row.height / 2 + y }, shown);
  if (shown !== text) element.append(svgElement("title", {}, text));
  return element;
}
