"""Pools of two ranks over NCCL, a GPU each."""

import pytest
from pool import Pool

# without the first no product is deterministic; the others keep NCCL's last words short where a rank is missing
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


@pytest.fixture(scope="module", autouse=True)
def group():
    """Nothing: each rank is a process of its own here."""
    return


@pytest.fixture(scope="session")
def pool():
    """Two ranks as users have them: NCCL's waits do not hold the host."""
    pool = Pool(2, "nccl", ENVIRONMENT)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def blocking_pool():
    """Two ranks whose waits hold the host, so that a missing rank is an error there, as it is over gloo."""
    pool = Pool(2, "nccl", {**ENVIRONMENT, "TORCH_NCCL_BLOCKING_WAIT": "1"})
    yield pool
    pool.close()
