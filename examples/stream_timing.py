"""How long does `with torch.cuda.stream(...)` hold the host? The question's experiment, then with `tw.timed()`.

    python examples/stream_timing.py

The host's clock around launches reads the launches. `timed()` reads both times and says which of them means what.
"""

import argparse
import contextlib
import time

import torch

import torchweave as tw


def work(size: int, products: int, device: str) -> None:
    a = torch.randn(size, size, device=device)
    b = torch.randn(size, size, device=device)
    for _ in range(products):
        torch.mm(a, b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="rows and columns (default: 10000 on a GPU, 1000 on a CPU)")
    parser.add_argument("--products", type=int, default=100)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, size = ("cuda", args.size or 10_000) if cuda else ("cpu", args.size or 1000)
    blocks = {"default stream": contextlib.nullcontext}
    if cuda:
        side = torch.cuda.Stream()
        blocks["side stream"] = lambda: torch.cuda.stream(side)
    else:
        print("torch sees no CUDA device: no streams here, and launching is computing. Both clocks agree.\n")

    work(size, 1, device)  # warm up
    print("As asked, by the host's clock alone:")
    for name, context in blocks.items():
        if cuda:
            torch.cuda.synchronize()
        start = time.time()
        with context():
            work(size, args.products, device)
        print(f"  {name}: {(time.time() - start) * 1e3:,.1f} ms")

    print("\nWith tw.timed():")
    for name, context in blocks.items():
        with tw.timed() as t, context():
            work(size, args.products, device)
        print(f"  {name}: host {t.host_ms:,.1f} ms, device {t.device_ms:,.1f} ms\n    {t}")


if __name__ == "__main__":
    main()
