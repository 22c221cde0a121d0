"""Two threads with a stream each, and a synchronization of the device after every piece."""
# cause: explicit_sync
# accept: host_busy, gil
# options: --skip 2 --steps 1
# after: T101

import threading

import torch

import torchweave as tw

a, b = (torch.rand(16, 1_500_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
turn = threading.Semaphore(1)


def run(rows, stream):
    for _ in range(6):
        # as a lock around a shared model does
        with turn, torch.cuda.stream(stream):
            for _ in range(4):
                torch.cumsum(rows, 1)
            torch.cuda.synchronize()  # culprit


for _ in range(5):
    threads = [threading.Thread(target=run, args=pair) for pair in ((a, s1), (b, s2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tw.step()
