"""A plain training step of a mixture of experts over several ranks, for `torchweave why`: nothing in it overlaps.

torchrun --nproc-per-node 2 -m torchweave why benchmarks/two_gpus_script.py
"""

import torch
import torch.distributed as dist

import torchweave
from torchweave.measure.subject import Subject, SubjectOptions
from torchweave.measure.training import join

NUM_STEPS = 8


def main() -> None:
    device = join()
    on_gpu = device.type == "cuda"
    sizes = SubjectOptions("moe", 2, 2048, 4096, 4) if on_gpu else SubjectOptions("moe", 1, 128, 128, 1, link_gbps=0.0)
    subject = Subject(sizes, device)
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-4)
    for _ in range(NUM_STEPS):
        loss = subject.model.loss(subject.batches.next())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torchweave.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
