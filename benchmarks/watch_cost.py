"""What seeing every operator costs the host, by several ways: python benchmarks/watch_cost.py

Host time of one layer of a small model on the CPU, least of rounds that alternate: torch's profiler alone, with stacks,
with an empty function mode, with an empty dispatch mode, and with ours.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from torchweave.record.dispatch import OnThreads, Operators
from torchweave.record.functions import Functions as Lines
from torchweave.record.writer import Writer

LAYERS, REPEATS, ROUNDS = 20, 20, 15


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def ours(every_operator: bool) -> Iterator[None]:
    writer = Writer()
    writer.on = True
    modes = OnThreads(Operators(writer, lambda _: True, lambda _: 0) if every_operator else Lines(writer))
    modes.enter()
    try:
        yield
    finally:
        modes.leave()


def profiled(make: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext, **options):
    @contextmanager
    def both() -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], **options), make():
            yield

    return both


WAYS = {
    "nothing": contextlib.nullcontext,
    "profiler": profiled(),
    "profiler, with_stack": profiled(with_stack=True),
    "profiler, empty function mode": profiled(Functions),
    "profiler, empty dispatch mode": profiled(Dispatched),
    "profiler, lines (timed steps)": profiled(partial(ours, False)),
    "every operator (one more step)": partial(ours, True),
}


def main() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))
    x, least = torch.ones(4, 8), dict.fromkeys(WAYS, float("inf"))
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, way in WAYS.items():
                with way():
                    model(x)
                    begin = time.perf_counter()
                    for _ in range(REPEATS):
                        model(x)
                    took = (time.perf_counter() - begin) / REPEATS / LAYERS * 1e6
                least[name] = min(least[name], took)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, least of {ROUNDS} rounds, us a layer")
    for name, took in least.items():
        print(f"{name:32} {took:6.1f}  {took / least['profiler']:.2f} of the profiler alone")


if __name__ == "__main__":
    main()
