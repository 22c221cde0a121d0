"""One GPU with a simulated link: every row of the goals, by every strategy, side by side in one run.

    python benchmarks/one_gpu.py --out results

Writes one JSON file with every row, and for the first rows a trace of a serial and of a woven pair.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from rows import head, join_or_be_alone, options, record_pair, told, write

from torchweave.engine.pair import engine
from torchweave.measure.bench import Bench, BenchOptions
from torchweave.measure.subject import SubjectOptions


class Row(NamedTuple):
    """A line of the table of goals: a chunk, its link, and the share that `auto` is to recover."""

    chunk: str
    hidden: int
    link_ms: float
    sms: int
    goal: float
    layers: int = 4
    of_limit: bool = False


ROWS = (
    Row("moe", 4096, 0.27, 1, 0.95),
    Row("moe", 4096, 0.84, 1, 0.95),
    Row("moe", 4096, 1.2, 1, 0.95),
    Row("moe", 7168, 0.43, 1, 0.97),
    Row("moe", 7168, 1.07, 1, 0.97),
    Row("moe", 4096, 0.27, 32, 0.95, of_limit=True),
    Row("moe", 4096, 0.84, 8, 0.95, of_limit=True),
    Row("moe", 4096, 1.2, 4, 0.95, of_limit=True),
    Row("moe", 2048, 0.15, 1, 0.90),
    Row("moe", 2048, 0.45, 1, 0.90),
    Row("moe", 1024, 0.07, 1, 0.90, layers=8),
    Row("dropless", 4096, 0.27, 1, 0.85),
    Row("dropless", 4096, 0.84, 1, 0.85),
    Row("dense", 4096, 0.2, 8, 0.85),
    Row("dense", 2048, 0.2, 8, 0.85),
    Row("alone", 4096, 0.2, 1, 0.0),
    Row("alone", 1024, 0.2, 1, 0.0),
)
NUM_TRACED = 2


def main() -> None:
    args = options(__doc__, len(ROWS), limit_s=500.0).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("one_gpu.py needs a CUDA device")
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    device = join_or_be_alone()
    command = f"python benchmarks/one_gpu.py --rounds {args.rounds}"
    result = {**head("one GPU, simulated link, one rank over NCCL", command, device), "rows": []}
    for place, index in enumerate(args.rows):
        if time.monotonic() - begun > args.limit_s:
            result["not_measured"] = [ROWS[left]._asdict() for left in args.rows[place:]]
            break
        row = ROWS[index]
        subject = SubjectOptions(
            row.chunk, row.layers, row.hidden, args.tokens, 4, link_ms=row.link_ms, link_sms=row.sms
        )
        bench = Bench(BenchOptions(subject, rounds=args.rounds), device)
        found = bench.run(lambda *_: None)
        result["rows"].append({**row._asdict(), **found})
        print(f"{row}: {told(found)}", flush=True)
        if index < NUM_TRACED:
            with bench.subject.link:
                for strategy in ("serial", "turns"):
                    name = f"h200_hidden{row.hidden}_link{row.link_ms}ms_{strategy}.json.gz"
                    record_pair(bench.subject, strategy, args.out / name)
        engine().close()
        del bench
        torch.cuda.empty_cache()
        write(args.out / "one_gpu.json", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
