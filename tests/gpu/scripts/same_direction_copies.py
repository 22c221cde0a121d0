"""Two uploads at once share one copy engine."""
# cause: copy_engine
# options: --skip 2 --steps 1

import torch

import torchweave as tw

hosts = [torch.randn(4096, 4096, pin_memory=True) for _ in range(2)]
targets = [torch.empty(4096, 4096, device="cuda") for _ in range(2)]
s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(5):
    s1.wait_stream(torch.cuda.current_stream())
    s2.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        for host, target, stream in zip(hosts, targets, (s1, s2), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(host, non_blocking=True)  # culprit
    torch.cuda.current_stream().wait_stream(s1)
    torch.cuda.current_stream().wait_stream(s2)
    tw.step()
