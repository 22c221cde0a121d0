"""One GPU with a simulated link: serial, woven by each strategy, and both bounds, side by side in one run.

    python benchmarks/one_gpu.py --out results

Writes one JSON file with every row, and for the first row a trace of a serial and of a woven pair.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gzip
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from torchweave.engine.pair import engine, weave
from torchweave.measure.pair_times import PairBench
from torchweave.measure.training import Demo, DemoOptions, versions

# hidden, layers, the link's time for a collective (ms), SMs that it holds
ROWS = (
    (4096, 4, 0.27, 1),
    (4096, 4, 0.84, 1),
    (4096, 4, 1.2, 1),
    (2048, 4, 0.45, 1),
)
TOP_K, BYTES = 4, 2


def gbps_for(hidden: int, tokens: int, ms: float) -> float:
    """Return the link's speed at which an all-to-all of a layer takes so long."""
    return tokens * TOP_K * hidden * BYTES * 8 / ms / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="how many of the rows")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--strategies", nargs="+", default=["turns", "streams"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # has to be there before cuBLAS is: without it no product is deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    result = {
        "what": "one GPU, simulated link, one rank over NCCL",
        "command": f"python benchmarks/one_gpu.py --rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0),
        "versions": versions(device),
        "rows": [],
    }
    for index, (hidden, layers, ms, sms) in enumerate(ROWS[: args.rows]):
        options = DemoOptions(
            layers=layers, hidden=hidden, tokens=args.tokens, link_gbps=gbps_for(hidden, args.tokens, ms), link_sms=sms
        )
        demo = Demo(options, device)
        with demo.link:
            for strategy in args.strategies:
                row = measure(demo, strategy, args.rounds)
                row |= {"hidden": hidden, "layers": layers, "tokens": args.tokens, "link_ms": ms, "link_sms": sms}
                result["rows"].append(row)
                print(
                    f"hidden {hidden} link {ms} ms {strategy:8s} "
                    f"serial {row['serial_ms']:.2f} woven {row['woven_ms']:.2f} "
                    f"compute {row['compute_ms']:.2f} communication {row['communication_ms']:.2f} "
                    f"recovered {row['recovered_share']:.3f} hidden {row['hidden_share']:.3f} "
                    f"bit-equal {row['bit_equal']} activations {row['activations_mib']:.0f} MiB, "
                    f"peak {row['peak_serial_mib']:.0f} -> {row['peak_woven_mib']:.0f}, "
                    f"reserved {row['reserved_serial_mib']:.0f} -> {row['reserved_woven_mib']:.0f}",
                    flush=True,
                )
            if index < 2:
                for strategy in ("serial", "turns"):
                    record(demo, strategy, args.out / f"h200_hidden{hidden}_link{ms}ms_{strategy}.json.gz")
        engine().close()
        del demo
        torch.cuda.empty_cache()
        # written after every row: a run that is cut short keeps what it has
        (args.out / "one_gpu.json").write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


def measure(demo: Demo, strategy: str, rounds: int) -> dict[str, object]:
    """Return one row: the four timings, and both peaks of memory."""
    woven = functools.partial(weave, strategy=strategy)
    times = PairBench(demo.make_pair, woven, demo.link, demo.group, demo.device).run(rounds, warmup=4)
    row = asdict(times)
    row.pop("samples")
    row |= {"strategy": strategy, "bit_equal": demo.is_bit_equal()}
    for label, name in (("serial", "serial"), ("woven", strategy)):
        demo.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        forward, backward = demo.make_pair()
        row["activations_mib"] = (torch.cuda.memory_allocated() - before) / 2**20
        torch.cuda.reset_peak_memory_stats()
        out = weave(forward, backward, strategy=name)
        torch.cuda.synchronize()
        row[f"peak_{label}_mib"] = torch.cuda.max_memory_allocated() / 2**20
        row[f"reserved_{label}_mib"] = torch.cuda.max_memory_reserved() / 2**20
        del out, forward, backward
    return row


def record(demo: Demo, strategy: str, path: Path) -> None:
    """Write a trace of one pair, with the operators of both strands' threads."""
    forward, backward = demo.make_pair()
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    torch.cuda.synchronize()
    with torch.profiler.profile(experimental_config=config) as profile:
        torch.cuda._sleep(80_000_000)  # the host is ahead, as in training
        weave(forward, backward, strategy=strategy)
        torch.cuda.synchronize()
    plain = path.with_suffix("")
    profile.export_chrome_trace(str(plain))
    trace = json.loads(plain.read_text())
    trace.pop("traceName", None)  # a path of this machine
    with gzip.open(path, "wt") as target:
        json.dump(trace, target)
    plain.unlink()


if __name__ == "__main__":
    main()
