"""Both hooks on two ranks with all-to-alls in both strands: woven, and bit-equal to backward and then forward."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_PAIRS = 4  # the first of a kind is recorded; the others are woven


def criterion(output, target):
    return (output - target).square().mean()


def deepseek_hook(chunk0, x0, target0, chunk1, output1, grad1, strategy):
    from torchweave.adapters.deepseek import overlapped_forward_backward

    return overlapped_forward_backward(
        chunk0, [x0], criterion, [target0], chunk1, None, [output1], [grad1], strategy=strategy
    )


def megatron_hook(chunk0, x0, target0, chunk1, output1, grad1, strategy):
    from torchweave.adapters.megatron import overlapped_forward_backward

    def step(inputs, module):
        x, target, mask = inputs
        assert mask is None
        return module(x), lambda output: (criterion(output, target), {})

    chunk0.set_input_tensor = lambda tensors: None
    return overlapped_forward_backward(
        chunk0, [x0], target0, None, None, [output1], [grad1], step, True, strategy=strategy
    )


def serial(chunk0, x0, target0, chunk1, output1, grad1, strategy):
    torch.autograd.backward([output1], [grad1])
    output0 = chunk0(x0)
    return [output0], criterion(output0, target0)


def run_pairs(hook, strategy):
    """Run some pairs; return every result and gradient, and for each pair the order in which its layers ran."""
    from moe_chunk import make_chunk

    torch.manual_seed(dist.get_rank())
    chunk0, chunk1 = make_chunk(3, 8), make_chunk(3, 8)
    order, orders, results = [], [], []

    def watch_gradient(_module, _inputs, output):
        output.register_hook(lambda _: order.append("backward"))

    for layer0, layer1 in zip(chunk0, chunk1, strict=True):
        layer0.register_forward_hook(lambda *_: order.append("forward"))
        layer1.register_forward_hook(watch_gradient)
    for _ in range(NUM_PAIRS):
        x0, x1, grad1, target0 = (torch.randn(16, 8) for _ in range(4))
        x1.requires_grad_()
        chunk0.zero_grad()
        chunk1.zero_grad()
        output1 = chunk1(x1)
        order.clear()
        (output0,), loss0 = hook(chunk0, x0, target0, chunk1, output1, grad1, strategy)
        orders.append(list(order))
        grads = [x1.grad, *(p.grad for p in chunk1.parameters())]
        loss0.backward()
        results += [output0, loss0, *grads, *(p.grad for p in chunk0.parameters())]
    return results, orders


def rank_main(rank, store):
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    wanted, orders = run_pairs(serial, None)
    assert orders == [["backward"] * 3 + ["forward"] * 3] * NUM_PAIRS
    for hook in (deepseek_hook, megatron_hook):
        for strategy in ("serial", "turns", "auto"):
            results, orders = run_pairs(hook, strategy)
            torch.testing.assert_close(results, wanted, rtol=0, atol=0)
            woven = [order for order in orders if order != ["backward"] * 3 + ["forward"] * 3]
            if strategy == "turns":
                assert len(woven) == NUM_PAIRS - 1, f"{hook.__name__}: {orders}"
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_both_hooks_weave_all_to_alls_and_stay_bit_equal(tmp_path):
    mp.spawn(rank_main, args=(tmp_path / "store",), nprocs=2)
