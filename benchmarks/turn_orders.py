"""What the order of turns can bring: alternating, the best order, and the bound, forecast from a measured trace.

    python benchmarks/turn_orders.py
    python benchmarks/turn_orders.py --measure --slower 20

The segments are those of the recorded serial pair on an H200 (results/h200_hidden4096_link0.84ms_serial.json.gz). For
other sizes of the model, matrix products grow with the square of the width, everything else with the width; half of a
backward's products are its weights'. What other rows of the goals need beside that is said where it is made up.

`--measure` runs pairs of the same segments on this machine, where computation sleeps and the link is simulated, by the
order that alternates and by `auto`: what is tried is whether the engine finds and keeps the order that is forecast.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchweave.engine.forecast import Segment, alternating, best_order, bound_us, span_us
from torchweave.engine.pair import choices, engine, weave
from torchweave.measure.link import SimulatedLink
from torchweave.measure.subject import MOST_TRIED

TRACE = Path(__file__).parent / "results" / "h200_hidden4096_link0.84ms_serial.json.gz"
LAYERS, HIDDEN = 4, 4096
_END, _ELSEWHERE = -2, -1
_COMPUTE = threading.Lock()


class Part(NamedTuple):
    """A segment that ends with one operation: work before it, the weights' part of it, and the link's time, ms."""

    work_ms: float
    weights_ms: float = 0.0
    link_ms: float = 0.0
    # the host reads a number of the device's: the link has no part in that
    reads: bool = False


class Row(NamedTuple):
    """A pair."""

    name: str
    backward: tuple[Part, ...]
    forward: tuple[Part, ...]


class _Work(NamedTuple):
    """A segment of the trace: products, and everything else, ms."""

    products: float
    rest: float

    def at(self, hidden: int) -> tuple[float, float]:
        """Return all of it, and its products, for another width."""
        width = hidden / HIDDEN
        products = self.products * width * width
        return products + self.rest * width, products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="run the pairs, too, with computation that sleeps")
    parser.add_argument("--slower", type=float, default=20.0, help="how much slower than a GPU these are")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name has one of these in it")
    parser.add_argument("--out", type=Path, help="file for what was measured")
    args = parser.parse_args()
    rows = [row for row in all_rows() if any(word in row.name for word in args.only)]
    print(f"{'':42} {'serial':>7} {'bound':>7} | {'alternating':>14} | {'best order':>14} | with weights later")
    for row in rows:
        print(line_of(row))
    if args.measure:
        result = measured(rows, args)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def line_of(row: Row) -> str:
    """Return what a pair takes: serially, at best, alternating, in the best order; and the last two, weights later."""
    plain, later = (segments_of(row, later=later) for later in (False, True))
    serial_us = span_us(*plain, "B" * len(plain[0]) + "F" * len(plain[1]))
    least_us = bound_us(*plain)

    def told(us: int) -> str:
        return f"{us / 1e3:7.2f} ({(serial_us - us) / (serial_us - least_us):.2f})"

    columns = [told(us) for strands in (plain, later) for us in (plainly(*strands), span_us(*strands, best(strands)))]
    return f"{row.name:42} {serial_us / 1e3:7.2f} {least_us / 1e3:7.2f} | " + " | ".join(columns) + f"  {best(plain)}"


def plainly(backward: Sequence[Segment], forward: Sequence[Segment]) -> int:
    """Return what a pair takes where the turn changes at every wait, us."""
    return span_us(backward, forward, alternating(len(backward), len(forward)))


def best(strands: tuple[tuple[Segment, ...], tuple[Segment, ...]]) -> str:
    """Return the best order of turns."""
    return best_order(*strands)


def segments_of(row: Row, *, later: bool) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return a pair's segments, the weights' part after the operation's start, or before it as in plain autograd."""

    def of(parts: tuple[Part, ...]) -> tuple[Segment, ...]:
        made, num_issued = [], 0
        for index, (work, weights, link, reads) in enumerate(parts):
            behind = weights if later else 0.0
            before_us, behind_us = round((work - behind) * 1e3), round(behind * 1e3)
            if reads:
                made.append(Segment((), before_us, _ELSEWHERE, round(link * 1e3)))
            elif index == len(parts) - 1:
                made.append(Segment((), before_us + behind_us, _END))
            else:
                made.append(Segment(((before_us, round(link * 1e3)),), behind_us, num_issued))
                num_issued += 1
        return tuple(made)

    return of(row.backward), of(row.forward)


def all_rows() -> list[Row]:
    """Return the pairs of the goals, and some whose strands have different numbers of crossings."""
    works = read_trace()
    sizes = ((4096, 0.27), (4096, 0.84), (4096, 1.2), (7168, 0.43), (7168, 1.07), (2048, 0.15), (2048, 0.45))
    rows = [_moe(works, hidden, link) for hidden, link in sizes]
    rows += [_dropless(works, link) for link in (0.27, 0.84)]
    rows += [_dense(hidden, 0.2) for hidden in (4096, 2048)]
    plain = _moe(works, 4096, 0.84)
    backward, forward = plain.backward, plain.forward
    rows.append(Row("backward of 4 layers, forward of 2, 0.84 ms", backward, (*forward[:4], forward[-1])))
    rows.append(Row("backward of 2 layers, forward of 4, 0.84 ms", (*backward[:4], backward[-1]), forward))
    return rows


def _moe(works: tuple[list[_Work], list[_Work]], hidden: int, link_ms: float) -> Row:
    backward, forward = ([work.at(hidden) for work in strand] for strand in works)
    links = [link_ms] * (2 * LAYERS) + [0.0]
    return Row(
        f"hidden {hidden}, {link_ms:g} ms",
        tuple(Part(work, products / 2, link) for (work, products), link in zip(backward, links, strict=True)),
        tuple(Part(work, 0.0, link) for (work, _), link in zip(forward, links, strict=True)),
    )


def _dropless(works: tuple[list[_Work], list[_Work]], link_ms: float) -> Row:
    """Each layer's forward also exchanges counts, 0.03 ms, and its host reads them, and launches 0.15 ms later.

    Between the numbers and the exchange of rows stand 0.15 ms of work.
    """
    plain = _moe(works, HIDDEN, link_ms)
    forward: list[Part] = []
    for index, part in enumerate(plain.forward):
        if index % 2 == 0 and index < 2 * LAYERS:
            forward += [part._replace(link_ms=0.03), Part(0.02, link_ms=0.15, reads=True), Part(0.15, link_ms=link_ms)]
        else:
            forward.append(part)
    return Row(f"dropless, hidden {HIDDEN}, {link_ms:g} ms", plain.backward, tuple(forward))


def _dense(hidden: int, link_ms: float) -> Row:
    """Attention as in the trace, without its router; a perceptron of 2.75 times the width, at the experts' speed."""
    width = hidden / HIDDEN
    qkv_and_out, attention, perceptron, gate = 0.68 * width**2, 0.25 * width, 1.41 * width**2, 0.2 * width
    forward = [Part(qkv_and_out + attention, 0, link_ms), Part(perceptron + gate, 0, link_ms)] * LAYERS
    backward = [
        Part(2 * perceptron + gate, perceptron, link_ms),
        Part(2 * qkv_and_out + 2 * attention, qkv_and_out, link_ms),
    ] * LAYERS
    return Row(f"dense, hidden {hidden}, {link_ms:g} ms", (*backward, Part(0.2 * width)), (*forward, Part(0.2 * width)))


def read_trace() -> tuple[list[_Work], list[_Work]]:
    """Return the backward's and the forward's segments of the recorded serial pair."""
    with gzip.open(TRACE) as file:
        events = json.load(file)["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = sorted((kernel for kernel in kernels if "spin" not in kernel["name"]), key=lambda kernel: kernel["ts"])
    segments: list[list[dict[str, float]]] = [[]]
    for kernel in kernels:
        if kernel["name"].startswith("torchweave_link"):
            segments.append([])
        else:
            segments[-1].append(kernel)
    both = segments[2 * LAYERS]
    # the forward begins by filling the one-hot rows of its tokens
    begin = max(at for at, kernel in enumerate(both[:60]) if "FillFunctor<long>" in kernel["name"])
    strands = (*segments[: 2 * LAYERS], both[:begin]), (both[begin:], *segments[2 * LAYERS + 1 :])
    return tuple([_work_of(segment) for segment in strand] for strand in strands)


def _work_of(kernels: Sequence[dict[str, float]]) -> _Work:
    def total(*words: str) -> float:
        return sum(one["dur"] for one in kernels if any(word in one["name"] for word in words)) / 1e3

    products = total("nvjet", "cutlass")
    return _Work(products, total("") - products)


def measured(rows: Sequence[Row], args: argparse.Namespace) -> dict[str, object]:
    """Run each pair on this machine, serially, alternating, and as `auto` chooses, in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine().channels.lone_groups_are_slow = True
    found = []
    try:
        for row in rows:
            engine().close()
            # 1,000 bytes a millisecond of the row's
            with SimulatedLink(0.008 / args.slower):
                found.append({"row": row.name, **_measured(row, args.slower, args.rounds)})
            print(json.dumps(found[-1]))
    finally:
        engine().close()
        dist.destroy_process_group()
    return {
        "what": "pairs whose computation sleeps, one gloo rank, simulated link",
        "command": f"python benchmarks/turn_orders.py --measure --slower {args.slower:g} --rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_at_the_end": os.getloadavg()[0],
        "versions": {"torch": torch.__version__},
        "rows": found,
    }


def _measured(row: Row, slower: float, rounds: int) -> dict[str, object]:
    backward, forward = _sleeping(row.backward, slower), _sleeping(row.forward, slower)
    for _ in range(MOST_TRIED):
        decision = engine().decision(forward, backward)
        if decision is not None and decision.trial.is_settled:
            break
        weave(forward, backward)
    ways: dict[str, Callable[[], None]] = {
        "serial": lambda: (backward(), forward()),
        "turns": lambda: weave(forward, backward, strategy="turns"),
        "auto": lambda: weave(forward, backward),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            begun = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - begun) * 1e3 / slower)
    (choice,) = choices()
    medians = {f"{name}_ms": round(statistics.median(times), 2) for name, times in samples.items()}
    spread = {name: [round(edge, 2) for edge in _quartiles(times)] for name, times in samples.items()}
    return {**medians, "spread": spread, "auto_takes": choice.strategy, "reason": choice.reason}


def _quartiles(times: list[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third


def _sleeping(parts: Sequence[Part], slower: float) -> Callable[[], None]:
    """Return a strand of the same segments: computation sleeps, and the link carries what takes its time."""
    buffers = [torch.zeros(max(1, round(part.link_ms * 1e3)), dtype=torch.uint8) for part in parts]

    def run() -> None:
        for part, buffer in zip(parts, buffers, strict=True):
            # one lane that computes: under `streams`, too
            with _COMPUTE:
                time.sleep(part.work_ms * slower / 1e3)
            if part.link_ms and not part.reads:
                dist.all_reduce(buffer)
            elif part.reads:
                time.sleep(part.link_ms * slower / 1e3)

    return run


if __name__ == "__main__":
    main()
