"""Memory: a woven pair holds what both strands need at once, and nothing after its end."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import Bomb, Pair, attempt, planted
from operations import late_wait
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchweave as tw

BOTH = ("turns", "streams")
WIDTH, ROWS = 64, 1024
TENSOR_BYTES = 4 * WIDTH * ROWS


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators made since it was entered, on every thread that inherits it."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = {}
        self._mutex = threading.RLock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage(), func)
        return result

    def _note(self, storage, func):
        with self._mutex:
            if storage.data_ptr() == 0 or any(ref() is storage for ref in [self._known.get(id(storage), lambda: None)]):
                return
            num_bytes, key = storage.nbytes(), id(storage)

            def forget(_):
                with self._mutex:
                    self.live -= num_bytes
                    if self._known.get(key) is reference:
                        del self._known[key]

            reference = self._known[key] = weakref.ref(storage, forget)
            self.live += num_bytes
            self.peak = max(self.peak, self.live)


class Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return late_wait(x)

    @staticmethod
    def backward(ctx, gradient):
        return late_wait(gradient)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Communicate.apply(self.linear(x).tanh())


def make_pairs():
    torch.manual_seed(1)
    chunks = [nn.Sequential(*(Layer() for _ in range(6)), Bomb()) for _ in range(2)]

    def pair(step):
        x0, x1 = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
        box = [chunks[1](x1).square().sum()]

        def forward():
            return chunks[0](x0).square().sum()

        return Pair(forward, lambda: box.pop().backward(), lambda: None)

    return chunks, pair


def peaks(strategy):
    """Return peak and live bytes afterwards of: backward alone, forward alone, both serially, both woven."""
    chunks, pair = make_pairs()
    found = []

    def measure(run):
        for module in chunks:
            module.zero_grad()
        gc.collect()
        with LiveBytes() as counter:
            result = run()
        found.append((counter.peak, counter.live))
        return result

    for step in range(2):
        made = pair(step)
        tw.weave(made.forward, made.backward, strategy=strategy)
    made = pair(2)
    measure(made.backward)
    measure(made.forward)
    made = pair(3)
    measure(lambda: (made.backward(), made.forward())[1])
    made = pair(4)
    measure(lambda: tw.weave(made.forward, made.backward, strategy=strategy))
    return found


@pytest.mark.parametrize("strategy", BOTH)
def test_the_peak_is_at_most_both_strands_together(pool, strategy):
    """Catches results, Works or inputs that are held longer than their strand needs them."""
    for backward, forward, serial, woven in pool.run(peaks, strategy):
        assert serial[0] <= backward[0] + forward[0]
        assert serial[0] > 4 * TENSOR_BYTES, "nothing was counted"
        assert woven[0] <= backward[0] + forward[0], (backward, forward, serial, woven)
        assert woven[1] <= serial[1], f"{woven[1] - serial[1]} bytes more live after the woven pair: {woven}, {serial}"


def run(made, strategy):
    """Run a pair by a strategy, or without torchweave: what plain Python leaves behind is no fault of ours."""
    if strategy == "plain":
        made.backward()
        return made.forward()
    return tw.weave(made.forward, made.backward, strategy=strategy)


def what_is_left(strategy):
    """Return how many of a pair's tensors live on without the garbage collector, after the caller let go of them."""
    _, pair = make_pairs()
    for step in range(2):
        made = pair(step)
        run(made, strategy)
    gc.collect()
    gc.disable()
    try:
        watched = []
        made = pair(2)

        def forward():
            y = made.forward()
            watched.append(weakref.ref(y.untyped_storage()))
            inner = y.grad_fn.next_functions[0][0]._saved_self
            watched.append(weakref.ref(inner.untyped_storage()))
            return y

        output = run(made._replace(forward=forward), strategy)
        assert all(reference() is not None for reference in watched)
        made = None
        del output
        return sum(reference() is not None for reference in watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ["plain", "serial", "turns", "streams"])
def test_nothing_outlives_the_pair_without_the_garbage_collector(pool, strategy):
    """Catches cycles of our own (strands that know each other) that hold results until Python happens to collect."""
    assert pool.run(what_is_left, strategy) == [0, 0]


def left_after_failures(strategy):
    """Fail ten times; how many bytes are live after that, beyond those after the first?"""
    chunks, pair = make_pairs()
    for step in range(2):
        made = pair(step)
        run(made, strategy)
    live = []
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as counter:
            for step in range(10):
                made = pair(step)
                chunks[0][-1].armed, chunks[0][-1].go_off = "forward", planted
                told = attempt(lambda made=made: run(made, strategy))
                chunks[0][-1].armed = ""
                assert told[0] == "PlantedError", told[2]
                for module in chunks:
                    module.zero_grad()
                del made
                live.append(counter.live)
    finally:
        gc.enable()
    dist.barrier()
    return live


@pytest.mark.parametrize("strategy", ["plain", *BOTH])
def test_failures_do_not_pile_up_memory(pool, strategy):
    """Catches a failed pair whose tensors hang on a traceback, a strand or a Work for good."""
    for live in pool.run(left_after_failures, strategy):
        assert live[-1] <= live[1] + TENSOR_BYTES, live
