"""Draw the lanes of a serial and of a woven pair, from two recorded traces, as one SVG.

python docs/lanes.py SERIAL.json.gz WOVEN.json.gz docs/pictures/lanes.svg
"""

from __future__ import annotations

import gzip
import json
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from torchweave.intervals import intersection, length, union

# Okabe and Ito's colours, which colour-blind people can tell apart; the legend names them too
COLOURS = {"forward": "#0072B2", "backward": "#E69F00", "communication": "#009E73"}
WIDTH, LEFT, LANE, GAP = 1000, 130, 26, 6
FONT = "font-family='system-ui,sans-serif' font-size='13' fill='#333'"


def lanes_of(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return begin and end (us) of every device operation by its kind: forward, backward, communication."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    # operators and launches can carry different thread ids: they are joined by what the recorder calls External id
    operators = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    in_backward: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event["name"].startswith("autograd::engine::evaluate_function"):
            in_backward.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in in_backward.values():
        spans.sort()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLOURS}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or "spin_kernel" in event["name"]:
            continue
        kind = kind_of(event, operators.get(event["args"].get("External id")), in_backward)
        found[kind].append((event["ts"], event["ts"] + event["dur"]))
    return found


def kind_of(event: Any, operator: Any, in_backward: dict[Any, list[tuple[float, float]]]) -> str:
    if event["name"].startswith(("torchweave_link", "nccl")):
        return "communication"
    spans = in_backward.get(operator["tid"], []) if operator else []
    at = bisect_right(spans, (operator["ts"], float("inf"))) - 1 if operator else -1
    # nodes do not nest on one thread but for a backward inside a backward: the nearest begin decides
    return "backward" if at >= 0 and operator["ts"] <= spans[at][1] else "forward"


def draw(panels: list[tuple[str, dict[str, list[tuple[float, float]]]]]) -> str:
    """Return the SVG: one panel each, on one scale."""
    spans = [span_of(lanes) for _, lanes in panels]
    scale = (WIDTH - LEFT - 20) / max(end - begin for begin, end in spans)
    parts, top = [], 34
    for (title, lanes), (begin, end) in zip(panels, spans, strict=True):
        shown = f"{title}: {(end - begin) / 1e3:.1f} ms, {hidden_share(lanes):.0%} of communication hidden"
        parts.append(f"<text x='{LEFT}' y='{top - 6}' {FONT} font-weight='600'>{escape(shown)}</text>")
        for label, kinds in (("computation", ("forward", "backward")), ("communication", ("communication",))):
            parts.append(f"<text x='{LEFT - 10}' y='{top + 18}' {FONT} text-anchor='end'>{label}</text>")
            parts.append(f"<rect x='{LEFT}' y='{top}' width='{WIDTH - LEFT - 20}' height='{LANE}' fill='#f2f2f2'/>")
            for kind in kinds:
                parts.extend(bars(lanes[kind], begin, scale, top, COLOURS[kind]))
            top += LANE + GAP
        top += 34
    parts.extend(legend(top - 14))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {top + 10}' role='img' "
        f"aria-label='Lanes of a serial and of a woven pair'><rect width='100%' height='100%' fill='white'/>"
        + "".join(parts)
        + "</svg>\n"
    )


def span_of(lanes: dict[str, list[tuple[float, float]]]) -> tuple[float, float]:
    every = [span for spans in lanes.values() for span in spans]
    return min(begin for begin, _ in every), max(end for _, end in every)


def hidden_share(lanes: dict[str, list[tuple[float, float]]]) -> float:
    def ns(kinds: tuple[str, ...]) -> Any:
        return union([(int(b * 1000), int(e * 1000)) for kind in kinds for b, e in lanes[kind]])

    communication = ns(("communication",))
    return length(intersection(communication, ns(("forward", "backward")))) / max(length(communication), 1)


def bars(spans: list[tuple[float, float]], begin: float, scale: float, top: int, colour: str) -> list[str]:
    """Return rectangles; operations closer than a fifth of a pixel are drawn as one."""
    joined: list[list[float]] = []
    for first, last in sorted(spans):
        if joined and (first - joined[-1][1]) * scale < 0.2:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return [
        f"<rect x='{LEFT + (first - begin) * scale:.2f}' y='{top}' width='{max((last - first) * scale, 0.3):.2f}' "
        f"height='{LANE}' fill='{colour}'/>"
        for first, last in joined
    ]


def legend(top: int) -> list[str]:
    parts = []
    for index, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 150
        parts.append(f"<rect x='{x}' y='{top - 11}' width='14' height='14' fill='{colour}'/>")
        parts.append(f"<text x='{x + 20}' y='{top}' {FONT}>{kind}</text>")
    return parts


if __name__ == "__main__":
    serial, woven, target = (Path(word) for word in sys.argv[1:])
    target.write_text(draw([("serial", lanes_of(serial)), ("woven, by turns", lanes_of(woven))]))
