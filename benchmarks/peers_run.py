"""weave beside what people do today, on the same model, in the same run.

    python benchmarks/peers_run.py --out results                       # one GPU
    torchrun --nproc-per-node 2 benchmarks/peers_run.py --out results  # gloo, or NCCL with as many GPUs

Writes one JSON file and prints the table, with the lines that each way costs a user.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peers import ways
from rows import head, join_or_be_alone, write

from torchweave.engine.pair import engine
from torchweave.measure.bench import Bench, BenchOptions, Way
from torchweave.measure.subject import Subject, SubjectOptions


def peers(subject: Subject) -> dict[str, Way]:
    # with several ranks the collectives of free threads would cross
    return ways.in_order(subject) | (ways.free(subject) if dist.get_world_size() == 1 else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    for name in ("layers", "hidden", "tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--link-ms", type=float, nargs="+", default=[0.84])
    parser.add_argument("--link-sms", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    device = join_or_be_alone()
    rows = []
    for link_ms in args.link_ms:
        options = SubjectOptions("moe", args.layers, args.hidden, args.tokens, link_ms=link_ms, link_sms=args.link_sms)
        found = Bench(BenchOptions(options, ("turns", "auto"), args.rounds), device, peers).run(lambda *_: None)
        for name, row in found["strategies"].items():
            row["lines"] = ways.LINES.get(name, 1)
        rows.append(found)
        ways.restore()
        engine().close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        command = f"python benchmarks/peers_run.py --link-ms {' '.join(map(str, args.link_ms))}"
        write(args.out / "peers.json", {**head("weave beside what people do today", command, device), "rows": rows})
        for found in rows:
            print(f"{found['link']}: serial {found['serial_ms']:.2f} ms, bound {found['bound_ms']:.2f} ms")
            for name, row in found["strategies"].items():
                share = "-" if row["recovered_share"] is None else f"{row['recovered_share']:.3f}"
                told = f"recovered {share}, equal {row['bit_equal']}, {row['lines']} lines"
                print(f"  {name:12s} {row['woven_ms']:8.2f} ms, {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
