"""One GPU: DualPipeV with two chunks on one rank, every steady-state pair woven over a simulated link, beside serial.

    python benchmarks/pipeline_one_gpu.py --out benchmarks/results/pipeline_one_gpu.json

The same chunks, by both strategies in turn, step by step in one run: tokens per second, and whether the losses and
gradients of both are equal to the bit. `--device cpu` with small sizes tries the script out; its times mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from measuring.steps import Equality, in_turn, rates

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.language import next_byte_loss
from torchweave.measure.link import SimulatedLink
from torchweave.measure.moe import ModelSizes, MoeLanguageModel
from torchweave.measure.parts import parts_of
from torchweave.measure.text import Batches, python_text
from torchweave.measure.training import versions

TOP_K = 4
# the link's time for an all-to-all, ms, and the SMs that it holds: 1 stands for a copy engine
LINKS = ((0.27, 1), (0.84, 1), (1.2, 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="file for the result")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--schedule", default="dualpipev")
    add("--layers", type=int, default=4, help="of the whole model, half of them in each chunk")
    add("--hidden", type=int, default=4096)
    add("--tokens", type=int, default=4096, help="in a microbatch")
    add("--microbatches", type=int, default=10)
    add("--rounds", type=int, default=10, help="steps of each strategy")
    add("--strategies", nargs="+", default=["turns", "streams"])
    add("--links", type=int, default=len(LINKS), help="how many of the links")
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    store = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if args.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is there: deterministic products
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **store)
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **store)
    engine().channels.lone_groups_are_slow = True
    result = {
        "what": f"{args.schedule} with two chunks on one rank, over a simulated link",
        "command": f"python benchmarks/pipeline_one_gpu.py --device {args.device} --layers {args.layers} "
        f"--hidden {args.hidden} --tokens {args.tokens} --microbatches {args.microbatches} --rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu",
        "versions": versions(device),
        "rows": [],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for link_ms, sms in LINKS[: args.links]:
        row = measure(args, device, link_ms, sms)
        result["rows"].append(row)
        print(told(row), flush=True)
        # written after every row: a run that is cut short keeps what it has
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    engine().close()
    dist.destroy_process_group()


def measure(args: argparse.Namespace, device: torch.device, link_ms: float, sms: int) -> dict:
    """Return one row: tokens per second by each strategy, over one link."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sequence = min(args.tokens, 1024)
    sizes = ModelSizes(args.layers, args.hidden, int(args.hidden * 0.375), 4, TOP_K, sequence)
    group = dist.group.WORLD
    model = MoeLanguageModel(sizes, group, dtype=dtype, device=device)
    chunks = parts_of(model, 2)
    strategies = ["serial", *args.strategies]
    pipelines = {name: tw.pipeline.build(chunks, args.schedule, strategy=name) for name in strategies}
    batch = args.microbatches * args.tokens // sequence
    text = Batches(python_text(), batch, sequence, 1, device).next()
    gbps = args.tokens * TOP_K * args.hidden * dtype.itemsize * 8 / link_ms / 1e6
    pairs = sum(bool(action.parts) for action in pipelines[strategies[-1]].plan(args.microbatches).ranks[0])
    equality = Equality()

    def step(name: str) -> torch.Tensor:
        loss, _ = pipelines[name].step(
            text[:, :-1],
            text[:, 1:],
            num_microbatches=args.microbatches,
            loss_fn=next_byte_loss,
            keep_outputs=False,
        )
        return loss

    with SimulatedLink(gbps, sms=sms):
        times = in_turn(
            {name: partial(step, name) for name in strategies},
            args.rounds,
            device,
            before=partial(model.zero_grad, set_to_none=True),
            after=lambda name, loss: equality.see(name, [loss, *(p.grad for p in model.parameters())]),
        )
    return {
        "link_ms": link_ms,
        "link_sms": sms,
        "hidden": args.hidden,
        "layers": args.layers,
        "tokens": args.tokens,
        "microbatches": args.microbatches,
        "pairs": pairs,
        **equality.said(),
        **rates(times, args.microbatches * args.tokens),
    }


def told(row: dict) -> str:
    rates = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in row["tokens_per_second"].items())
    gains = ", ".join(f"{name} {gain:.3f}x" for name, gain in row["speedup"].items())
    return f"link {row['link_ms']} ms, {row['pairs']} pairs: {rates}; {gains}; bit-equal {row['bit_equal']}"


if __name__ == "__main__":
    main()
