// Columns of numbers as the report holds them: base64 of little-endian arrays, times as gaps and lengths in ns.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function decodeColumn(column) {
  return new ARRAYS[column.type](bytesOf(column.base64).buffer);
}

// Begins and ends, sorted by begin. `reach[i]` is the latest end up to i: it rises, so it can be searched.
function decodeTimes(entry) {
  const gap = decodeColumn(entry.gap);
  const length = decodeColumn(entry.length);
  const begin = new Float64Array(gap.length);
  const end = new Float64Array(gap.length);
  const reach = new Float64Array(gap.length);
  let at = 0;
  let furthest = -Infinity;
  for (let i = 0; i < gap.length; i++) {
    at += gap[i];
    begin[i] = at;
    end[i] = at + length[i];
    if (end[i] > furthest) furthest = end[i];
    reach[i] = furthest;
  }
  return { begin, end, reach, size: gap.length };
}

function decodeLane(entry) {
  return {
    ...decodeTimes(entry),
    device: entry.device,
    stream: entry.stream,
    name: decodeColumn(entry.name),
    side: decodeColumn(entry.side),
  };
}

// The first row whose value is at least (or, with `above`, above) a limit.
function firstAtLeast(values, limit, above = false) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < limit || (above && values[middle] === limit)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The rows that lie at least partly in [begin, end): from `first`, before `last`; some between may have ended before.
function rowsIn(times, begin, end) {
  return { first: firstAtLeast(times.reach, begin), last: firstAtLeast(times.begin, end, true) };
}

// The row at a time, or the nearest within `slack` ns; of several, the one that began last. -1 where there is none.
function rowAt(times, at, slack) {
  const { first, last } = rowsIn(times, at - slack, at + slack);
  let best = -1;
  let bestDistance = Infinity;
  for (let i = last - 1; i >= first && last - i < 5000; i--) {
    const distance = Math.max(times.begin[i] - at, at - times.end[i], 0);
    if (distance <= slack && distance < bestDistance) {
      best = i;
      bestDistance = distance;
    }
    if (bestDistance === 0) break;
  }
  return best;
}

function formatMs(ns, digits) {
  return (ns / 1e6).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function formatLength(ns) {
  if (ns >= 1e6) return `${formatMs(ns, 3)} ms`;
  return ns >= 1e3 ? `${(ns / 1e3).toFixed(2)} µs` : `${Math.round(ns)} ns`;
}

// `void at::native::vectorized_kernel<4, ...>(int, ...)` is `vectorized_kernel` where there is no room for all of it.
function shortName(name) {
  const plain = name.replace(/\(anonymous namespace\)::/g, "").replace(/^void /, "");
  const head = plain.split(/[<(]/, 1)[0].trim() || plain;
  const parts = head.split("::");
  return parts[parts.length - 1] || head;
}
