// What a reader does with one figure: wheel, drag, click, keys and buttons, and what hovering shows.

class Handles {
  constructor(figure, onCause) {
    this.figure = figure;
    this.onCause = onCause;
    this.drag = null;
    const canvas = figure.canvas;
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    figure.root.append(this.tip);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", () => this.cancel());
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", (event) => figure.zoom(0.4, figure.timeAt(this.place(event).x)));
    canvas.addEventListener("keydown", (event) => this.key(event));
    figure.root.querySelector(".tools").addEventListener("click", (event) => this.button(event.target.dataset.do));
  }

  place(event) {
    const rect = this.figure.svg.getBoundingClientRect();
    const { width, height } = this.figure;
    return { x: ((event.clientX - rect.left) * width) / rect.width, y: ((event.clientY - rect.top) * height) / rect.height };
  }

  rowAt(y) {
    return this.figure.rows.find((row) => y >= row.top - 2 && y < row.top + row.height + 2);
  }

  wheel(event) {
    const figure = this.figure;
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    const mine = event.ctrlKey || event.metaKey || document.activeElement === figure.canvas;
    if (!mine && !sideways) return;
    event.preventDefault();
    if (sideways) figure.pan((event.deltaX || event.deltaY) / figure.width);
    else figure.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), figure.timeAt(this.place(event).x));
  }

  down(event) {
    if (event.button !== 0) return;
    const { x, y } = this.place(event);
    const { begin, end } = this.figure;
    this.drag = { x, y, begin, end, moved: false, zooms: event.shiftKey };
    this.figure.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const { x, y } = this.place(event);
    if (!this.drag) {
      this.hover(x, y, event);
      return;
    }
    const { figure, drag } = this;
    if (Math.abs(x - drag.x) > 3) drag.moved = true;
    if (!drag.moved) return;
    this.tip.hidden = true;
    if (drag.zooms) {
      figure.zoomRange = [figure.timeAt(drag.x), figure.timeAt(x)];
      figure.draw();
      return;
    }
    figure.canvas.classList.add("dragging");
    const shift = (drag.x - x) / figure.scale.perNs;
    figure.show(drag.begin + shift, drag.end + shift);
  }

  up(event) {
    const { figure, drag } = this;
    if (!drag) return;
    const range = figure.zoomRange;
    this.cancel();
    if (range) figure.show(Math.min(...range), Math.max(...range));
    else if (!drag.moved) this.click(this.place(event));
  }

  cancel() {
    this.drag = null;
    this.figure.zoomRange = null;
    this.figure.canvas.classList.remove("dragging");
    this.figure.draw();
  }

  click({ x, y }) {
    const { figure } = this;
    if (y < 12) {
      const middle = ((x - figure.gutter) / figure.scale.width) * figure.span;
      const half = (figure.end - figure.begin) / 2;
      figure.show(middle - half, middle + half);
      return;
    }
    const row = this.rowAt(y);
    if (!row) return;
    if (row.kind === "cause") this.onCause(row.index);
    if (row.kind !== "lane") return;
    const lane = figure.lanes[row.index];
    this.choose(row.index, x < figure.gutter ? -1 : rowAt(lane, figure.timeAt(x), 2 / figure.scale.perNs));
  }

  hover(x, y, event) {
    const row = this.rowAt(y);
    const parts = row && x >= this.figure.gutter ? this.describe(row, x) : null;
    this.tip.hidden = !parts;
    if (!parts) return;
    this.tip.replaceChildren(...parts);
    const { innerWidth, innerHeight } = window;
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    const below = event.clientY + 18;
    this.tip.style.top = `${below + height > innerHeight ? Math.max(4, event.clientY - height - 12) : below}px`;
  }

  describe(row, x) {
    const { figure } = this;
    const at = figure.timeAt(x);
    const pixel = 1 / figure.scale.perNs;
    if (row.kind === "both") {
      const found = rowAt(figure.both, at, pixel);
      return found < 0 ? null : lines("Both sides ran", moment(figure.both, found));
    }
    if (row.kind === "cause") {
      const cause = figure.causes[row.index];
      for (const [times, what] of [[cause.lost, "overlap lost"], [cause.idle, "idle"]]) {
        const found = rowAt(times, at, pixel);
        if (found >= 0) return lines(`${cause.name}: ${what}`, moment(times, found));
      }
      return null;
    }
    return this.describeLane(row.index, at, pixel);
  }

  describeLane(index, at, pixel) {
    const lane = this.figure.lanes[index];
    const { first, last } = rowsIn(lane, at - pixel / 2, at + pixel / 2);
    if (last - first > 1) return lines(...this.crowd(lane, first, last, at, pixel));
    const found = rowAt(lane, at, 2 * pixel);
    return found < 0 ? null : lines(...this.operation(index, found));
  }

  // Several operations under one pixel: how many, how busy, and the longest.
  crowd(lane, first, last, at, pixel) {
    let longest = first;
    let busy = 0;
    let covered = at - pixel / 2;
    for (let i = first; i < last; i++) {
      if (lane.end[i] - lane.begin[i] > lane.end[longest] - lane.begin[longest]) longest = i;
      const [from, to] = [Math.max(lane.begin[i], covered), Math.min(lane.end[i], at + pixel / 2)];
      if (to > from) [busy, covered] = [busy + to - from, to];
    }
    const name = this.figure.names[lane.name[longest]];
    const share = Math.round((100 * busy) / pixel);
    return [
      `${(last - first).toLocaleString("en-US")} operations within ${formatLength(pixel)} at ${formatMs(at, 3)} ms`,
      `stream ${lane.stream}, busy ${share} % of that time; the longest (${formatLength(lane.end[longest] - lane.begin[longest])}):`,
      name,
    ];
  }

  operation(index, row) {
    const lane = this.figure.lanes[index];
    const side = this.figure.sides[lane.side[row] - 1];
    return [
      this.figure.names[lane.name[row]],
      moment(lane, row),
      `stream ${lane.stream} of device ${lane.device}${side ? `, side: ${side}` : this.figure.sides.length ? ", neither side" : ""}`,
      `operation ${(row + 1).toLocaleString("en-US")} of ${lane.size.toLocaleString("en-US")} on it`,
    ];
  }

  choose(index, row) {
    const { figure } = this;
    figure.chosenLane = index;
    figure.chosen = row < 0 ? null : { lane: index, row };
    const lane = figure.lanes[index];
    const parts = row < 0 ? [`Lane: stream ${lane.stream}, ${lane.size} operations`] : this.operation(index, row);
    figure.details.replaceChildren(...lines(...parts));
    figure.draw();
  }

  // The next operation of the chosen lane, brought into view where it is outside.
  step(by) {
    const { figure } = this;
    const index = Math.max(figure.chosenLane, 0);
    const lane = figure.lanes[index];
    if (!lane || !lane.size) return;
    const from = figure.chosen ? figure.chosen.row + by : firstAtLeast(lane.reach, figure.begin);
    const row = Math.min(Math.max(from, 0), lane.size - 1);
    this.choose(index, row);
    const [begin, end] = [lane.begin[row], lane.end[row]];
    const length = figure.end - figure.begin;
    if (begin < figure.begin || end > figure.end) figure.show(begin - 0.2 * length, begin + 0.8 * length);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { figure } = this;
    const lane = (by) => {
      const count = figure.lanes.length;
      if (count) this.choose(Math.min(Math.max(figure.chosenLane + by, 0), count - 1), -1);
    };
    const actions = {
      ArrowLeft: () => figure.pan(-0.15),
      ArrowRight: () => figure.pan(0.15),
      ArrowUp: () => lane(-1),
      ArrowDown: () => lane(1),
      "+": () => figure.zoom(0.6),
      "=": () => figure.zoom(0.6),
      "-": () => figure.zoom(1 / 0.6),
      0: () => figure.fit(),
      Home: () => figure.fit(),
      n: () => this.step(1),
      p: () => this.step(-1),
      Escape: () => this.clear(),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  clear() {
    this.figure.chosen = null;
    this.figure.chosenLane = -1;
    this.figure.details.replaceChildren();
    this.onCause(-1);
  }

  button(action) {
    const { figure } = this;
    const actions = {
      in: () => figure.zoom(0.5),
      out: () => figure.zoom(2),
      left: () => figure.pan(-0.3),
      right: () => figure.pan(0.3),
      fit: () => figure.fit(),
    };
    if (actions[action]) actions[action]();
  }
}

function moment(times, row) {
  return `begins ${formatMs(times.begin[row], 6)} ms, lasts ${formatLength(times.end[row] - times.begin[row])}`;
}

// Paragraphs of plain text; the first is the name.
function lines(...texts) {
  return texts.map((text, row) => {
    const line = document.createElement("p");
    if (row === 0) line.className = "op-name";
    line.textContent = text;
    return line;
  });
}
