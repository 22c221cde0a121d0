"""A woven pair equals backward, then forward, to the bit: every operation of torch.distributed in both strands."""

import pytest
from harness import Cross, chunk, check_pairs, pair_of
from operations import OPERATIONS

# why each is here: an operation whose wait is not found, found twice, or paired with another rank's wrong one
STRATEGIES = ("turns", "streams", "auto")


def check_operation(operation, strategy, way):
    def make():
        return pair_of(chunk(Cross(operation), Cross(operation)), chunk(Cross(operation), Cross(operation)))

    check_pairs(make, strategy, way)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda f: f.__name__)
def test_equal_to_serial(pool, operation, strategy):
    """Catches lost, doubled or swapped data of one operation in both strands."""
    pool.run(check_operation, operation, strategy, OPERATIONS[operation][strategy])


@pytest.mark.parametrize("strategy", ("turns", "streams"))
@pytest.mark.parametrize("name", ("all_to_all_single", "late_wait", "uneven_all_to_all", "batch_isend_irecv", "gather_scatter"))
def test_equal_to_serial_on_four_ranks(pool4, name, strategy):
    """Catches an order that happens to fit with two ranks alone."""
    operation = next(f for f in OPERATIONS if f.__name__ == name)
    pool4.run(check_operation, operation, strategy, OPERATIONS[operation][strategy])
