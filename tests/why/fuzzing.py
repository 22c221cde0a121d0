"""Mutated traces: bytes flipped, cut, doubled; numbers made odd; keys dropped; compression broken."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

TRACES = Path(__file__).parents[1] / "traces"
# small ones: what matters is how they are broken
BASES = (
    "causes/full_gemms.plain",
    "causes/download_each_step.plain",
    "causes/first_alloc_on_stream.full",
    "causes/seed_overlapped_forward_backward.plain",
    "ranks/sync_collective.plain.rank0",
    "ranks/late_peer.full.rank0",
)
_ODD = [
    "null",
    "NaN",
    "-Infinity",
    "1e400",
    "-1",
    "0",
    '"7"',
    "true",
    "[]",
    "{}",
    "[1,2]",
    "9" * 30,
    '"\\ud800"',
    "1.5e18",
]


def base(rng: random.Random) -> bytes:
    return gzip.decompress((TRACES / f"{rng.choice(BASES)}.json.gz").read_bytes())


def flipped(data: bytes, rng: random.Random) -> bytes:
    text = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 30])):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def spliced(data: bytes, rng: random.Random) -> bytes:
    one, other = sorted(rng.randrange(len(data)) for _ in range(2))
    return rng.choice([data[:one] + data[other:], data[:other] + data[one:]])


def compressed(data: bytes, rng: random.Random) -> bytes:
    packed = gzip.compress(data, 1)
    return rng.choice([cut, flipped, spliced])(packed, rng)


def odd_values(data: bytes, rng: random.Random) -> bytes:
    """Values of random keys become odd, everywhere or in places."""
    trace = json.loads(data)
    events = trace["traceEvents"]
    keys = sorted(
        {key for event in events for key in event}
        | {"args." + key for event in events for key in event.get("args") or {}}
    )
    share = rng.choice([0.001, 0.05, 1.0])
    marks = {}
    for key in rng.sample(keys, rng.choice([1, 2, 5])):
        for event in events:
            holder = event.get("args") if key.startswith("args.") else event
            name = key.removeprefix("args.")
            if isinstance(holder, dict) and name in holder and rng.random() < share:
                mark = f"@{len(marks)}@"
                marks[mark] = rng.choice(_ODD)
                holder[name] = mark
    text = json.dumps(trace)
    for mark, value in marks.items():
        text = text.replace(f'"{mark}"', value, 1)
    return text.encode("utf-8", "surrogatepass")


def dropped(data: bytes, rng: random.Random) -> bytes:
    """Rows, keys or the head are missing, doubled or in another order."""
    trace = json.loads(data)
    events = trace["traceEvents"]
    choice = rng.randrange(6)
    if choice == 0:
        events = [event for event in events if rng.random() < 0.5]
    elif choice == 1:
        key = rng.choice(["cat", "name", "ts", "dur", "pid", "tid", "args", "ph"])
        events = [
            {name: value for name, value in event.items() if name != key or rng.random() < 0.5} for event in events
        ]
    elif choice == 2:
        rng.shuffle(events)
    elif choice == 3:
        gone = rng.choice(["kernel", "cuda_runtime", "cpu_op", "gpu_memcpy", "python_function"])
        events = [event for event in events if event.get("cat") != gone]
    elif choice == 4:
        events = events + [dict(event) for event in events]
    else:
        return json.dumps(events).encode()
    return json.dumps({**trace, "traceEvents": events}).encode()


def moved(data: bytes, rng: random.Random) -> bytes:
    """Times of a category are shifted, stretched or made equal."""
    trace = json.loads(data)
    category = rng.choice(["kernel", "cuda_runtime", "cpu_op"])
    shift = rng.choice([-1e6, 1e3, 1e9, 1e14])
    for event in trace["traceEvents"]:
        if event.get("cat") == category and "ts" in event:
            event["ts"] = rng.choice([event["ts"] + shift, event["ts"], 0])
            event["dur"] = rng.choice([event.get("dur", 0), 0, 1e6])
    return json.dumps(trace).encode()


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flipped,
    cut,
    spliced,
    compressed,
    odd_values,
    dropped,
    moved,
)


def mutated(seed: int) -> bytes:
    """Return one mutated trace."""
    rng = random.Random(seed)
    data = base(rng)
    for _ in range(rng.choice([1, 1, 1, 2])):
        try:
            data = rng.choice(MUTATIONS)(data, rng)
        except (ValueError, TypeError):
            # an earlier mutation left nothing to change
            break
    return data
