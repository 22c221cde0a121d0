"""A woven pair equals backward, then forward, to the bit: every operation of torch.distributed in both strands."""

import pytest
from harness import Cross, check_pairs, chunk, pair_of
from operations import NCCL_FAMILIES, NOT_OVER_NCCL, OPERATIONS

STRATEGIES = ("turns", "streams", "auto")


def check_operation(operation, strategies):
    def make():
        return pair_of(chunk(Cross(operation), Cross(operation)), chunk(Cross(operation), Cross(operation)))

    for strategy in strategies:
        check_pairs(make, strategy, OPERATIONS[operation][strategy])


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_equal_to_serial(pool, operation):
    """Catches lost, doubled or swapped data of one operation, a wait that is not found, or one found twice."""
    pool.run(check_operation, operation, STRATEGIES)


FOUR = ("all_to_all_single", "late_wait", "uneven_all_to_all", "batch_isend_irecv", "gather_scatter")


@pytest.mark.parametrize("operation", [f for f in OPERATIONS if f.__name__ in FOUR], ids=lambda f: f.__name__)
def test_equal_to_serial_on_four_ranks(pool4, operation):
    """Catches an order that happens to fit with two ranks alone."""
    pool4.run(check_operation, operation, ("turns", "streams"))


def test_every_operation_is_tried_over_nccl_or_says_why_not():
    """Catches an operation that was added for gloo alone."""
    named = [operation for family in NCCL_FAMILIES.values() for operation in family]
    assert sorted(one.__name__ for one in (*named, *NOT_OVER_NCCL)) == sorted(one.__name__ for one in OPERATIONS)
