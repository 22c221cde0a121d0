"""A woven pair equals backward, then forward, to the bit: over NCCL, on two GPUs."""

import datetime
import functools

import pytest
import torch
from harness import Cross, check_pairs, chunk, device, pair_of
from layers import LAYERS, is_refused, run
from operations import NCCL_FAMILIES, NCCL_OTHERWISE, OPERATIONS

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.limited import limited_group
from torchweave.measure.subject import Subject, SubjectOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

STRATEGIES = ("turns", "streams", "auto")
LIMIT_S = 30.0


def check_operations(family):
    """Return what differed, by operation; ranks go on together whatever one of them finds."""
    troubles = []
    for operation in NCCL_FAMILIES[family]:

        def make(operation=operation):
            return pair_of(chunk(Cross(operation), Cross(operation)), chunk(Cross(operation), Cross(operation)))

        for strategy in STRATEGIES:
            way = NCCL_OTHERWISE.get(operation, OPERATIONS[operation])[strategy]
            try:
                check_pairs(make, strategy, way)
            except AssertionError as error:
                troubles.append(f"{operation.__name__}: {error}")
            # another strategy is tried from the record on
            engine().close()
    return troubles


@pytest.mark.parametrize("family", NCCL_FAMILIES)
def test_every_operation_in_both_strands(pool, family):
    """Catches lost, doubled or swapped data of one operation, a wait that is not found, or one found twice."""
    assert pool.run(check_operations, family, group_timeout_s=LIMIT_S) == [[], []]


def check_layers():
    torch.use_deterministic_algorithms(True, warn_only=True)
    troubles = []
    for layer in LAYERS:
        expected = run(layer, "serial")
        for strategy in STRATEGIES:
            if is_refused(layer, strategy):
                continue
            for index, (one, other) in enumerate(zip(expected, run(layer, strategy), strict=True)):
                if not torch.equal(one, other):
                    troubles.append(f"{layer.__name__} by {strategy}: tensor {index} of {len(expected)} differs")
            engine().close()
    torch.use_deterministic_algorithms(False)
    return troubles


def devices_in_use():
    """Return the devices on which this rank has a context, after a pair."""
    run(LAYERS[0], "turns")
    run(LAYERS[0], "streams")
    return [one for one in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(one)]


def test_ranks_leave_each_others_devices_alone(pool):
    """Catches a context, and its memory, on every device of the machine."""
    assert pool.run(devices_in_use, group_timeout_s=LIMIT_S) == [[0], [1]]


def test_every_kind_of_layer(pool):
    """Catches a lane that is not waited for."""
    assert pool.run(check_layers, group_timeout_s=LIMIT_S) == [[], []]


def check_models(channels):
    group = None if channels is None else limited_group(channels, datetime.timedelta(seconds=LIMIT_S))
    found = {}
    for kind in ("moe", "dropless", "dense"):
        subject = Subject(SubjectOptions(kind, 2, 256, 256, 2, link_gbps=0.0), device(), group=group)
        for strategy in STRATEGIES:
            found[kind, strategy] = subject.is_bit_equal(functools.partial(tw.weave, strategy=strategy))
        engine().close()
    return [name for name, equal in found.items() if not equal]


@pytest.mark.parametrize("channels", [None, 4])
def test_models_with_deterministic_kernels(pool, channels):
    """Catches a gradient that is not the serial one's to the bit, on the default group and on a slow one."""
    assert pool.run(check_models, channels, group_timeout_s=LIMIT_S) == [[], []]


def weave_often():
    """Weave pairs whose communicated tensors are freed at once, while the other strand takes memory."""
    expected = run(LAYERS[0], "serial", rounds=6)
    found = [run(LAYERS[0], strategy, rounds=6) for strategy in ("turns", "streams") for _ in range(3)]
    return all(torch.equal(one, other) for tensors in found for one, other in zip(expected, tensors, strict=True))


def test_memory_of_what_is_sent_is_not_used_again_too_early(pool):
    """Catches a tensor that is freed before the lane of its wait has it: other data would be sent, now and then."""
    assert pool.run(weave_often, group_timeout_s=LIMIT_S) == [True, True]
