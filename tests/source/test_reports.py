"""Programs after the patterns of public reports, by whose threads the cause is known; each in code of our own.

The numbers say which pattern; docs/check.md names none of them, so that the rules are not written for a list.
"""

from __future__ import annotations

import pytest
from marked import assert_found_where_marked

REPORTS = {
    "streams that work on an input of the default stream": """
        x = torch.randn(10240, 10240, device="cuda")
        s1 = torch.cuda.Stream()
        with torch.cuda.stream(s1):
            y = torch.matmul(x, x)  # -> missing_wait
        torch.cuda.synchronize()
    """,
    "four streams, each with an upload that is not pinned": """
        inputs = [torch.randn(1 << 20) for _ in range(4)]
        streams = [torch.cuda.Stream() for _ in range(4)]
        for i, s in enumerate(streams):
            with torch.cuda.stream(s):
                d = inputs[0].to("cuda", non_blocking=True)  # -> pageable_copy
                d.exp_()
    """,
    "a transform for each of several GPUs, with one synchronize each": """
        def run(xs, streams):
            for x, s in zip(xs, streams):
                with torch.cuda.stream(s):
                    y = torch.fft.rfft(x)
                torch.cuda.synchronize()  # -> explicit_sync
    """,
    "pipelining over streams whose gradients cross them": """
        def step(stage, x, side):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = stage(torch.exp(x))
            grad = torch.rand(8, 8, device="cuda")
            with torch.cuda.stream(side):
                torch.autograd.backward([out], [grad])  # -> missing_wait
    """,
    "indexing by a mask in every step": """
        def run(batches, side):
            for batch in batches:
                with torch.cuda.stream(side):
                    nxt = torch.cumsum(batch, 0)
                scores = torch.sigmoid(batch)
                kept = scores[scores > 0.5]  # -> host_sync
    """,
    "pinning on the fly while offloading": """
        def offload(tensors, side):
            for t in tensors:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    host = torch.empty_like(t, device="cpu", pin_memory=True)  # -> pinned_alloc
                    host.copy_(t, non_blocking=True)
    """,
    "saved tensors offloaded, and dropped before the copy is done": """
        def save(x, host, side):
            packed = x.float().contiguous() * 1.0
            small = torch.clamp(packed, -1, 1)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(small, non_blocking=True)  # -> missing_wait
            small = None
    """,
    "memory given back in every step": """
        def train(loader, model, optimizer):
            for batch in loader:
                loss = model(batch.cuda()).mean()
                loss.backward()
                optimizer.step()
                torch.cuda.empty_cache()  # -> device_alloc
    """,
    "a rate limiter that stops the host": """
        def gather(shards, side):
            for shard in shards:
                with torch.cuda.stream(side):
                    full = torch.cat([shard, shard])
                    done = side.record_event()
                done.synchronize()  # -> explicit_sync
                torch.relu(shard)
    """,
    "connections set to one, for tensor parallelism": """
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # -> max_connections
        from megatron.core import parallel_state
    """,
    "connections set at run time": """
        def initialize(rank):
            torch.cuda.set_device(rank)
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # -> max_connections
    """,
    "split sizes read on the host before an all-to-all": """
        def layers(tokens, counts, side):
            for layer in range(24):
                with torch.cuda.stream(side):
                    shared = torch.relu(tokens)
                splits = torch.bincount(counts).tolist()  # -> host_sync
                dist.all_to_all_single(tokens, tokens, splits, splits)
    """,
    "an all-reduce that is waited for at once": """
        def reduce_gradients(parameters):
            for p in parameters:
                handle = dist.all_reduce(p.grad, async_op=True)
                handle.wait()  # -> wide_dependency
    """,
    "a prefetcher whose loader does not pin": """
        from torch.utils.data import DataLoader
        loader = DataLoader(dataset, batch_size=256, num_workers=8)
        side = torch.cuda.Stream()
        for images, targets in loader:
            with torch.cuda.stream(side):
                images = images.cuda(non_blocking=True)  # -> pageable_copy
    """,
    "a prefetcher that waits inside of its own context": """
        class Prefetcher:
            def __init__(self, loader):
                self.loader, self.stream = iter(loader), torch.cuda.Stream()
            def preload(self):
                self.batch = next(self.loader)
                with torch.cuda.stream(self.stream):
                    self.stream.wait_stream(torch.cuda.current_stream())  # -> missing_wait
                    self.batch = self.batch.cuda(non_blocking=True)
    """,
    "three dozen streams": """
        streams = [torch.cuda.Stream() for _ in range(36)]  # -> stream_alias
    """,
    "threads that synchronize the device between their launches": """
        def worker(conv, bn, x, y, side):
            for _ in range(100):
                with torch.cuda.stream(side):
                    conv2 = torch.conv2d(x, conv)
                torch.cuda.synchronize()  # -> explicit_sync
                z = torch.batch_norm(y, None, None, None, None, True, 0.1, 1e-5, False)
                torch.cuda.synchronize()  # -> explicit_sync
    """,
    "backward wanted on another stream than its forward": """
        def overlap(model, x, other_loss):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other_loss.backward()  # -> backward_on_forward_stream
            return model(x)
    """,
    "collectives of an own stream, with the result used outside": """
        def dispatch(tokens, side):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                routed = torch.index_select(tokens, 0, torch.argsort(tokens[:, 0]))
            return torch.relu(routed)  # -> missing_wait
    """,
    "ten small products timed against a big one": """
        a, big = torch.randn(64, 64).cuda(), torch.randn(8192, 8192).cuda()
        begin = time.perf_counter()
        for _ in range(10):
            a @ a
        small = time.perf_counter()  # -> timed_without_sync
        big @ big
        end = time.perf_counter()  # -> timed_without_sync
        print(small - begin, end - small)
    """,
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_cause_of_a_report_is_found_on_its_line(name):
    assert_found_where_marked(REPORTS[name])


def test_there_are_enough_of_them():
    assert len(REPORTS) >= 15
