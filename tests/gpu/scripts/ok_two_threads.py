"""Two Python threads launch long kernels: harmless."""
# cause: none
# options: --skip 2 --steps 1

import threading

import torch

import torchweave as tw

a, b = (torch.rand(16, 300_000, device="cuda") for _ in range(2))
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()


def run(rows, stream):
    with torch.cuda.stream(stream):
        for _ in range(60):
            torch.cumsum(rows, 1)
            n = 0
            for i in range(3000):
                n += i


for _ in range(5):
    threads = [threading.Thread(target=run, args=pair) for pair in ((a, s1), (b, s2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tw.step()
