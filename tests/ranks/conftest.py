"""Pools of rank processes, shared by all tests of a session."""

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Two rank processes over gloo."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4():
    """Four rank processes over gloo, started at the first test that needs them."""
    pool = Pool(4)
    yield pool
    pool.close()
