"""Measure steps of torchweave's pipeline beside what `torchweave plan` simulates for them.

python benchmarks/plan_accuracy.py [--out FILE.json]

The stages sleep, so that the lengths of their actions are known and take no processor: what is left is whether runner
and simulation wait for the same things, and what transfers (gloo, one machine) and Python add.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torchweave as tw
from torchweave.measure.naps import Sleeper
from torchweave.schedule.build import build
from torchweave.schedule.costs import Costs
from torchweave.schedule.simulate import simulate

FORWARD_S = 0.05
STEPS = 5
CASES = [
    (2, "gpipe", 6), (2, "1f1b", 6), (2, "interleaved", 6), (2, "interleaved-pairs", 6), (2, "zb-h1", 6), (2, "zbv", 6),
    (2, "dualpipev", 6), (4, "1f1b", 8), (4, "dualpipev", 8), (4, "dualpipe", 8),
]  # fmt: skip


def measure(rank: int, num_ranks: int, port: int, results) -> None:
    """Measure the cases of this number of ranks."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    for _, name, num_microbatches in [case for case in CASES if case[0] == num_ranks]:
        chunks = [Sleeper(FORWARD_S) for _ in tw.pipeline.stages_of(name, rank, num_ranks)]
        stages = tw.pipeline.build(chunks, schedule=name, strategy="serial")
        x = torch.randn(2 * num_microbatches, 4)
        times = []
        for _ in range(STEPS + 1):
            dist.barrier()
            begin = time.perf_counter()
            stages.step(x, x, num_microbatches=num_microbatches, loss_fn=lambda y, t: (y - t).square().mean())
            dist.barrier()
            times.append(time.perf_counter() - begin)
        costs = Costs(F=FORWARD_S, B=2 * FORWARD_S, W=0.0)
        simulated = simulate(build(name, num_ranks, num_microbatches), costs, woven=False).step_time
        if rank == 0:
            results.put((num_ranks, name, num_microbatches, simulated, times[1:]))
    dist.destroy_process_group()


def row_said(name: str, ranks: int, microbatches: int, simulated: float, times: list[float]) -> str:
    middle, spread = statistics.median(times), f"{min(times):.3f} to {max(times):.3f}"
    case = f"{name:18} {ranks} ranks {microbatches} microbatches"
    return f"{case}: simulated {simulated:.3f} s, measured {middle:.3f} ({spread}): {middle / simulated - 1:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the result as JSON")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, rows = context.Queue(), []
    for num_ranks in sorted({case[0] for case in CASES}):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        workers = [context.Process(target=measure, args=(rank, num_ranks, port, results)) for rank in range(num_ranks)]
        for worker in workers:
            worker.start()
        for _ in [case for case in CASES if case[0] == num_ranks]:
            ranks, name, microbatches, simulated, times = results.get(timeout=120)
            print(row_said(name, ranks, microbatches, simulated, times), flush=True)
            numbers = {"ranks": ranks, "microbatches": microbatches, "simulated_s": simulated, "measured_s": times}
            rows.append({"schedule": name, **numbers})
        for worker in workers:
            worker.join(timeout=60)
    if args.out:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "torchweave": tw.__version__}
        record = {
            "command": " ".join(["python", *sys.argv]),
            "versions": versions,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "forward_s": FORWARD_S,
            "backward_s": 2 * FORWARD_S,
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
