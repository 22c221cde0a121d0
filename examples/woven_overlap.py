"""A backward and a forward that really overlap: the model of `naive_overlap.py` through `tw.weave`.

    python examples/woven_overlap.py                                       one process, nobody to talk to
    torchrun --nproc-per-node 2 examples/woven_overlap.py                  gloo, or NCCL where there are GPUs
    torchrun --nproc-per-node 8 examples/woven_overlap.py --hidden 4096 --tokens 4096

What can be gained is communication behind computation, so it takes ranks with a link between them that is worth
hiding. On one machine's CPU there is little; `torchweave demo` simulates a link that shows the effect.
"""

import argparse
import os
from statistics import median

import torch
import torch.distributed as dist
from moe_chunk import make_chunk

import torchweave as tw


def start() -> torch.device:
    """Join the ranks that torchrun started, or be the only one, and return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    return device


def step(chunk0, chunk1, x, strategy):
    """Run one pair; return its time, the forward's output and the backward's gradients."""
    chunk1.zero_grad()
    loss = chunk1(x).square().mean()
    with tw.timed() as t:
        output = tw.weave(forward=lambda: chunk0(x), backward=loss.backward, strategy=strategy)
    return t.device_ms, output.detach(), [p.grad.clone() for p in chunk1.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens on each rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--strategy", default="auto", choices=["auto", "serial", "turns", "streams"])
    args = parser.parse_args()

    device = start()
    torch.manual_seed(dist.get_rank())
    chunk0 = make_chunk(args.layers, args.hidden).to(device)
    chunk1 = make_chunk(args.layers, args.hidden).to(device)
    x = torch.randn(args.tokens, args.hidden, device=device)

    times = {"serial": [], args.strategy: []}
    for number in range(args.steps + 2):
        results = {}
        for strategy in times:
            elapsed, output, grads = step(chunk0, chunk1, x, strategy)
            results[strategy] = [output, *grads]
            if number >= 2:  # the first pairs load kernels and are recorded
                times[strategy].append(elapsed)
    pairs = zip(results["serial"], results[args.strategy], strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    if dist.get_rank() == 0:
        for strategy, values in times.items():
            print(f"{strategy}: {median(values):.3f} ms a pair (median of {len(values)})")
        print(f"largest difference of output and gradients from serial: {difference:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
