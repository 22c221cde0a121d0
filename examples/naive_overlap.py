"""The obvious way to overlap a backward with a forward, `with torch.cuda.stream(...)`; it overlaps nothing.

    python examples/naive_overlap.py --trace naive.json

records a trace and counts in it on which streams the kernels ran. Autograd launches a backward operation on the
stream of its forward operation, whatever stream is current around `backward()`; so both sides end up on one stream,
in one row of the trace. `woven_overlap.py` is the same model, woven.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from moe_chunk import make_chunk

from torchweave.intervals import length, union


def hook(chunk0, x0, loss1, side):
    """Run backward "on the side stream", then the forward: as people fill in DualPipe's hook at first."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss1.backward()
    output0 = chunk0(x0)
    torch.cuda.current_stream().wait_stream(side)
    return output0


def record(path: Path, layers: int, hidden: int, tokens: int) -> None:
    chunk0, chunk1 = make_chunk(layers, hidden).cuda(), make_chunk(layers, hidden).cuda()
    x = torch.randn(tokens, hidden, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(3):  # the first calls load kernels and fill the allocator's pool of each stream
        hook(chunk0, x, chunk1(x).square().mean(), side)
    loss = chunk1(x).square().mean()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        hook(chunk0, x, loss, side)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def report(path: Path) -> None:
    streams: dict[int, list[tuple[int, int]]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            begin, lasted = round(event["ts"] * 1000), round(event["dur"] * 1000)  # the trace counts microseconds
            streams.setdefault(event["args"]["stream"], []).append((begin, begin + lasted))
    for stream, kernels in sorted(streams.items()):
        print(f"stream {stream}: {len(kernels)} kernels, busy {length(union(kernels)) / 1e6:.3f} ms")
    alone = sum(length(union(kernels)) for kernels in streams.values())
    together = alone - length(union([kernel for kernels in streams.values() for kernel in kernels]))
    print(f"time in which two streams worked at once: {together / 1e6:.3f} ms of {alone / 1e6:.3f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path("naive_overlap.json"), help="where to write the trace")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "This example shows what CUDA streams do, and torch sees no CUDA device here. Run it on a machine with "
            "one,\nor run examples/woven_overlap.py, which needs none.",
            file=sys.stderr,
        )
        return 2
    record(args.trace, args.layers, args.hidden, args.tokens)
    report(args.trace)
    print(f"wrote {args.trace}: look at it in Perfetto (ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
