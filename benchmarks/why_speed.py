"""How fast `torchweave why` reads, diagnoses and prints a trace, and how much memory it takes.

    python benchmarks/why_speed.py [TRACE] [--copies 200] [--limit-s 3] [--limit-mib 800]

Without TRACE one of the project's own is tiled: its copies are put one behind the other, with their own correlation
numbers. A trace given with --copies 1 is read as it is. Each run is a fresh process, as a user's is. Exit code 1 if
the best run is over a limit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OWN = Path(__file__).parents[1] / "tests" / "traces" / "weave" / "moe_woven_turns.json.gz"


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    value = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return value if isinstance(value, dict) else {"traceEvents": value}


def tile(source: Path, target: Path, copies: int) -> int:
    """Write copies of a trace behind one another; return the number of events."""
    trace = load(source)
    events = trace.pop("traceEvents")
    timed = [event for event in events if "ts" in event]
    begin = min(event["ts"] for event in timed)
    length = max(event["ts"] + event.get("dur", 0) for event in timed) - begin + 1000
    step = 1 + max((_numbers(event) for event in events), default=0)
    with target.open("w") as file:
        file.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n')
        for copy in range(copies):
            for row, event in enumerate(timed):
                file.write((",\n" if copy or row else "") + json.dumps(_moved(event, copy * length, copy * step)))
        file.write("\n]}\n")
    return copies * len(timed)


def _numbers(event: dict[str, Any]) -> int:
    args = event.get("args") or {}
    return max((args[key] for key in ("correlation", "External id") if isinstance(args.get(key), int)), default=0)


def _moved(event: dict[str, Any], shift: float, step: int) -> dict[str, Any]:
    args = dict(event.get("args") or {})
    for key in ("correlation", "External id"):
        if isinstance(args.get(key), int):
            args[key] += step
    return {**event, "ts": event["ts"] + shift, "args": args}


def measure(path: Path) -> tuple[float, float, float]:
    """Return wall time, processor time (s) and the largest memory (MiB) of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    # the memory of the largest child so far is this one's: every run reads the same file
    done = subprocess.run(
        [sys.executable, "-m", "torchweave", "why", str(path)], stdout=subprocess.DEVNULL, check=False
    )
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"torchweave why ended with {done.returncode}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, after.ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=OWN)
    parser.add_argument("--copies", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=3.0)
    parser.add_argument("--limit-mib", type=float, default=800.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiled.json"
        events = tile(args.trace, path, args.copies) if args.copies > 1 else None
        path = path if events is not None else args.trace
        size = path.stat().st_size / 1e6
        runs = [measure(path) for _ in range(args.runs)]
    wall, processor, memory = (min(run[column] for run in runs) for column in range(3))
    print(f"{args.trace.name} x {args.copies}: {size:.0f} MB, {events or '?'} events, {os.cpu_count()} cores")
    print(f"{platform.python_implementation()} {platform.python_version()}, best of {args.runs} runs:")
    print(f"wall {wall:.2f} s, processor {processor:.2f} s, memory {memory:.0f} MiB")
    within = wall <= args.limit_s and memory <= args.limit_mib
    print(f"limits {args.limit_s:g} s, {args.limit_mib:g} MiB: {'kept' if within else 'BROKEN'}")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
