"""A tiny GPT of megatron-core, trained through the question's hook: its own collectives cross, equal to the bit."""

from __future__ import annotations

import functools
import importlib.util

import pytest
from adapter_cases import overlapped_ns
from harness import check_equal
from measuring.megatron_gpt import Gpt, groups_of_ranks, on_cpu, plain_pair, without_transformer_engine

from torchweave.adapters.megatron import overlapped_forward_backward
from torchweave.engine.pair import engine

NUM_STEPS = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="needs megatron-core: pip install megatron-core",
)


def train(tensor, expert, more, strategy):
    """Return the losses and gradients of all steps, and how long the strands overlapped in each, ns."""
    pair = plain_pair if strategy is None else functools.partial(overlapped_forward_backward, strategy=strategy)
    results, overlaps = [], []
    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        without_transformer_engine(patch)
        with groups_of_ranks(tensor, expert):
            model = Gpt(tensor, expert, "cpu", **more)
            for _ in range(NUM_STEPS):
                with engine().observe() as log:
                    results.append(model.step(pair))
                overlaps.append(overlapped_ns(log.spans))
    return results, overlaps


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("tensor", "expert", "more", "strategies"),
    [
        (2, 1, {}, ["turns", "streams"]),
        (1, 2, {}, ["turns", "streams", "auto"]),
        (1, 2, {"wrapped": True}, ["turns"]),
        (1, 2, {"moe_shared_expert_intermediate_size": 16, **RECOMPUTE}, ["turns"]),
    ],
    ids=[
        "tensor parallel",
        "expert parallel",
        "expert and data parallel",
        "expert parallel, recomputed, with a shared expert",
    ],
)
def test_a_gpt_of_megatron_trains_alike_with_and_without_weave(pool, tensor, expert, more, strategies):
    """Catches collectives of Megatron's that are no crossing, or that two strands exchange with each other."""
    alone = pool.run(train, tensor, expert, more, None)
    for strategy in strategies:
        found = pool.run(train, tensor, expert, more, strategy)
        for (expected, nothing), (results, overlaps) in zip(alone, found, strict=True):
            check_equal(expected, results, strategy)
            assert nothing == [0] * NUM_STEPS
            assert overlaps[-1] > 0 or strategy == "auto", (strategy, overlaps)
    losses = [sum(losses) for losses, _ in alone[0][0]]
    assert losses[-1] < losses[0], f"nothing was trained: {losses}"
