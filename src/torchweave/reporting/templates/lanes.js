// Drawing: from columns to what the pixels can show. All x are in pixels from the left edge of the time axis.

const SVG = "http://www.w3.org/2000/svg";
// An operation at least this wide is drawn by itself; narrower ones are added up, pixel by pixel.
const OWN_SHAPE_PX = 2;
const LABEL_PX = 34;
const FONTS = 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const LABEL_FONT = `10.5px ${FONTS}`;

const measuring = document.createElement("canvas").getContext("2d");

// As much of a text as there is room for, by this machine's fonts; nothing where that would say nothing.
function fitText(text, room, font) {
  measuring.font = font;
  const width = measuring.measureText(text).width;
  if (width <= room) return text;
  let letters = Math.floor((text.length * room) / width);
  while (letters > 2 && measuring.measureText(`${text.slice(0, letters)}…`).width > room) letters--;
  return letters > 2 ? `${text.slice(0, letters)}…` : "";
}

function svgElement(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  return element;
}

function round(value) {
  return Math.round(value * 10) / 10;
}

function box(x, y, width, height) {
  return `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${-round(width)}z`;
}

// What one lane shows: shapes of wide operations by side, and the busy share of each pixel by side for all others.
function measureLane(lane, scale) {
  const { begin, perNs, width } = scale;
  const shares = [0, 1, 2].map(() => new Float32Array(width + 1));
  const wide = [];
  const { first, last } = rowsIn(lane, begin, scale.end);
  for (let i = first; i < last; i++) {
    const left = Math.max((lane.begin[i] - begin) * perNs, 0);
    const right = Math.min((lane.end[i] - begin) * perNs, width);
    if (right < left) continue;
    if (right - left >= OWN_SHAPE_PX) wide.push({ row: i, left, right, side: lane.side[i] });
    else addShare(shares[lane.side[i]], left, right);
  }
  return { shares, wide, count: last - first };
}

// An operation without length still counts a trifle: what ran must be seen, and not look like more than it was.
function addShare(share, left, right) {
  let pixel = Math.floor(left);
  if (pixel === Math.floor(right)) {
    share[pixel] += Math.max(right - left, 1e-6);
    return;
  }
  for (; pixel < right; pixel++) share[pixel] += Math.min(right, pixel + 1) - Math.max(left, pixel);
}

// Columns of the kinds stand on each other: their height is the share of the pixel's time that each kind takes.
function sharePaths(shares, order, top, height) {
  const paths = shares.map(() => "");
  const levels = Math.max(Math.round(height), 1);
  const stack = new Float32Array(shares[0].length);
  for (const kind of order) {
    const tall = (pixel) => {
      const share = shares[kind][pixel] || 0;
      return share > 0 ? Math.min(Math.max(1, Math.round(share * levels)), levels - stack[pixel]) : 0;
    };
    forRuns(stack.length, (pixel) => tall(pixel) * 1000 + stack[pixel], (begin, end) => {
      const rise = tall(begin);
      const foot = stack[begin];
      if (rise > 0) paths[kind] += box(begin, top + height - foot - rise, end - begin, rise);
      stack.fill(foot + rise, begin, end);
    });
  }
  return paths;
}

// Calls `act(begin, end)` for each run of pixels with one key.
function forRuns(size, key, act) {
  let begin = 0;
  for (let pixel = 1; pixel <= size; pixel++) {
    if (pixel < size && key(pixel) === key(begin)) continue;
    act(begin, pixel);
    begin = pixel;
  }
}

function drawLane(lane, names, row, scale, fills) {
  const group = svgElement("g", { class: "ops" });
  const { shares, wide } = measureLane(lane, scale);
  const paths = sharePaths(shares, [1, 2, 0], row.top, row.height);
  for (const op of wide) {
    // half a pixel of air between neighbours, so that they can be told apart
    paths[op.side] += box(op.left, row.top, Math.max(op.right - op.left - 0.5, 1), row.height);
  }
  paths.forEach((path, side) => {
    if (path) group.append(svgElement("path", { d: path, ...fills[side] }));
  });
  for (const op of wide) {
    if (op.right - op.left < LABEL_PX) continue;
    const text = fitText(shortName(names[lane.name[op.row]]), op.right - op.left - 8, LABEL_FONT);
    const place = { x: round(op.left + 4), y: row.top + row.height / 2 + 4, class: `op-label op-label${op.side}` };
    if (text) group.append(svgElement("text", place, text));
  }
  return group;
}

// Moments as operations are shown: wide ones as they are, of narrow ones the share of each pixel.
function measureMoments(times, scale) {
  const share = new Float32Array(scale.width + 1);
  const wide = [];
  const { first, last } = rowsIn(times, scale.begin, scale.end);
  for (let i = first; i < last; i++) {
    const left = Math.max((times.begin[i] - scale.begin) * scale.perNs, 0);
    const right = Math.min((times.end[i] - scale.begin) * scale.perNs, scale.width);
    if (right < left) continue;
    if (right - left >= OWN_SHAPE_PX) wide.push([left, right]);
    else addShare(share, left, right);
  }
  return { share, wide };
}

// One path for each of several kinds of moments in one row.
function momentsPaths(kinds, scale, top, height) {
  const measured = kinds.map((times) => measureMoments(times, scale));
  const paths = sharePaths(measured.map((item) => item.share), kinds.map((_, row) => row), top, height);
  const boxes = measured.map((item) => item.wide.map(([left, right]) => box(left, top, right - left, height)).join(""));
  return paths.map((path, row) => path + boxes[row]);
}

// Moments through all lanes: what is narrower than a pixel is as faint as its share is small.
function drawBand(times, scale, top, height, attributes) {
  const { share, wide } = measureMoments(times, scale);
  const group = svgElement("g", attributes);
  const levels = 4;
  const paths = new Array(levels + 1).fill("");
  const level = (pixel) => (share[pixel] > 0 ? Math.max(1, Math.min(levels, Math.round(share[pixel] * levels))) : 0);
  forRuns(share.length, level, (begin, end) => (paths[level(begin)] += box(begin, top, end - begin, height)));
  for (const [left, right] of wide) paths[levels] += box(left, top, right - left, height);
  paths.forEach((d, row) => {
    if (row > 0 && d) group.append(svgElement("path", { d, opacity: row / levels }));
  });
  return group;
}

// Round times about 100 pixels apart.
function ticks(scale) {
  const least = 100 / scale.perNs;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= least);
  const digits = Math.max(0, 6 - Math.floor(Math.log10(step) + 1e-9));
  const result = [];
  for (let k = Math.ceil(scale.begin / step); k * step <= scale.end; k++) {
    result.push({ x: (k * step - scale.begin) * scale.perNs, text: formatMs(k * step, digits) });
  }
  return result;
}
