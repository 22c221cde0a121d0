"""What every test on a GPU needs."""

import os

import pytest
import torch
import torch.distributed as dist

# has to be there before cuBLAS is: without it no product is deterministic
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    """One rank over NCCL."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()
