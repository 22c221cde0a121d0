"""Scripts with a known cause that shows in the source, each beside its mended form, in which nothing may be found.

They are the shapes of the scripts whose traces are in tests/traces/causes.
"""

from __future__ import annotations

import pytest
from marked import assert_found_where_marked

HEAD = """\
import os
import threading
import time
import torch
import torch.nn as nn

def narrow(x, k=1):
    for _ in range(k):
        y = torch.cumsum(x, 1)
    return y

def rows(n=1_500_000):
    return torch.rand(16, n, device="cuda")

def mlp(h=1024, depth=6):
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(h, h), nn.GELU())]).cuda()

def fork(*streams):
    current = torch.cuda.current_stream()
    for s in streams:
        s.wait_stream(current)

def join(*streams):
    current = torch.cuda.current_stream()
    for s in streams:
        current.wait_stream(s)

"""

CASES = {
    "overlapped_forward_backward": (
        """
        f, g, side = mlp(2048), mlp(2048), torch.cuda.Stream()
        x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
        loss = g(x).square().mean()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss.backward()  # -> backward_on_forward_stream
            loss.detach_()
        out = f(x)
        torch.cuda.current_stream().wait_stream(side)
        """,
        """
        f, g, side = mlp(2048), mlp(2048), torch.cuda.Stream()
        x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = g(x).square().mean()
        with torch.cuda.stream(side):
            loss.backward()
        out = f(x)
        torch.cuda.current_stream().wait_stream(side)
        """,
    ),
    "stream_pool_alias": (
        """
        streams = [torch.cuda.Stream() for _ in range(33)]  # -> stream_alias
        a, b, s1, s2 = rows(), rows(), streams[0], streams[32]
        fork(s1, s2)
        for _ in range(40):
            with torch.cuda.stream(s1): narrow(a)
            with torch.cuda.stream(s2): narrow(b)
        join(s1, s2)
        """,
        """
        s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
        a, b = rows(), rows()
        fork(s1, s2)
        for _ in range(40):
            with torch.cuda.stream(s1): narrow(a)
            with torch.cuda.stream(s2): narrow(b)
        join(s1, s2)
        """,
    ),
    "item_each_step": (
        """
        a, b, s1, s2 = rows(), rows(), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(12):
            with torch.cuda.stream(s1):
                loss = narrow(a, 4).sum()
                value = loss.item()  # -> host_sync
            with torch.cuda.stream(s2):
                done = narrow(b, 4).sum().item()  # -> host_sync
        join(s1, s2)
        """,
        """
        a, b, s1, s2 = rows(), rows(), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(12):
            with torch.cuda.stream(s1):
                loss = narrow(a, 4).sum()
            with torch.cuda.stream(s2):
                done = narrow(b, 4).sum()
        join(s1, s2)
        print(loss.item(), done.item())
        """,
    ),
    "device_synchronize_in_loop": (
        """
        a, b, s1, s2 = rows(), rows(), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(10):
            with torch.cuda.stream(s1): narrow(a, 8)
            torch.cuda.synchronize()  # -> explicit_sync
            with torch.cuda.stream(s2): narrow(b, 8)
            torch.cuda.synchronize()  # -> explicit_sync
        join(s1, s2)
        """,
        """
        a, b, s1, s2 = rows(), rows(), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(10):
            with torch.cuda.stream(s1): narrow(a, 8)
            with torch.cuda.stream(s2): narrow(b, 8)
        join(s1, s2)
        torch.cuda.synchronize()
        """,
    ),
    "pageable_upload": (
        """
        a, h, s1, s2 = rows(), torch.randn(4096, 4096), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(6):
            with torch.cuda.stream(s2): d = h.to("cuda", non_blocking=True)  # -> pageable_copy
            with torch.cuda.stream(s1): torch.mm(a, a)
        join(s1, s2)
        """,
        """
        a, h, s1, s2 = rows(), torch.randn(4096, 4096, pin_memory=True), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(6):
            with torch.cuda.stream(s2): d = h.to("cuda", non_blocking=True)
            with torch.cuda.stream(s1): torch.mm(a, a)
        join(s1, s2)
        """,
    ),
    "pin_in_loop": (
        """
        a, hold, s1, s2 = rows(), [], torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for i in range(5):
            with torch.cuda.stream(s1): narrow(a, 4)
            h = torch.empty(512 * (i + 5), 4096, pin_memory=True)  # -> pinned_alloc
            hold.append(h)
            with torch.cuda.stream(s2): h[:64].to("cuda", non_blocking=True)
        join(s1, s2)
        """,
        """
        a, s1, s2 = rows(), torch.cuda.Stream(), torch.cuda.Stream()
        whole = torch.empty(512 * 10, 4096, pin_memory=True)
        fork(s1, s2)
        for i in range(5):
            with torch.cuda.stream(s1): narrow(a, 4)
            h = whole[: 512 * (i + 5)]
            with torch.cuda.stream(s2): h[:64].to("cuda", non_blocking=True)
        join(s1, s2)
        """,
    ),
    "launch_blocking, one_connection": (
        """
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # -> launch_blocking
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # -> max_connections
        a, s1 = rows(), torch.cuda.Stream()
        """,
        """
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        a, s1 = rows(), torch.cuda.Stream()
        """,
    ),
    "wait_on_itself": (
        """
        a, side = rows(), torch.cuda.Stream()
        x = narrow(a, 12)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())  # -> missing_wait
            y = narrow(x, 12)
        torch.cuda.current_stream().wait_stream(side)
        """,
        """
        a, side = rows(), torch.cuda.Stream()
        x = narrow(a, 12)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = narrow(x, 12)
        torch.cuda.current_stream().wait_stream(side)
        """,
    ),
    "seed_timing": (
        """
        side = torch.cuda.Stream()
        start = time.time()
        a = torch.randn(10000, 10000, device="cuda")
        for _ in range(20): c = torch.mm(a, a)
        print("calc time", time.time() - start)  # -> timed_without_sync
        torch.cuda.synchronize(); start = time.time()
        with torch.cuda.stream(side):
            a = torch.randn(10000, 10000, device="cuda")
            for _ in range(20): c = torch.mm(a, a)
        print("stream time", time.time() - start)  # -> timed_without_sync
        torch.cuda.synchronize()
        """,
        """
        side = torch.cuda.Stream()
        start = time.time()
        a = torch.randn(10000, 10000, device="cuda")
        for _ in range(20): c = torch.mm(a, a)
        torch.cuda.synchronize()
        print("calc time", time.time() - start)
        start = time.time()
        with torch.cuda.stream(side):
            a = torch.randn(10000, 10000, device="cuda")
            for _ in range(20): c = torch.mm(a, a)
        side.synchronize()
        print("stream time", time.time() - start)
        """,
    ),
    "download_each_step": (
        """
        a, s1, s2 = rows(), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        for _ in range(6):
            with torch.cuda.stream(s1):
                y = narrow(a, 2)
                total = y[:, :1000].cpu()  # -> host_sync
            with torch.cuda.stream(s2):
                z = narrow(a, 2)
                other = z[:, :1000].to("cpu")  # -> host_sync
        join(s1, s2)
        """,
        """
        a, s1, s2 = rows(), torch.cuda.Stream(), torch.cuda.Stream()
        host = torch.empty(16, 1000, pin_memory=True)
        fork(s1, s2)
        for _ in range(6):
            with torch.cuda.stream(s1):
                y = narrow(a, 2)
                host.copy_(y[:, :1000], non_blocking=True)
            with torch.cuda.stream(s2): z = narrow(a, 2)
        join(s1, s2)
        """,
    ),
}

# scripts whose cause does not show in the source, and those that overlap: nothing may be found
SILENT = {
    "two_blocks_no_stream": """
        a, b = rows(), rows()
        for _ in range(40): narrow(a)
        for _ in range(40): narrow(b)
    """,
    "ok_host_busy_but_queues_full": """
        a, b, s1, s2 = rows(), rows(), torch.cuda.Stream(), torch.cuda.Stream()
        def prepare_batch():
            t = time.perf_counter(); n = 0
            while time.perf_counter() - t < 0.004: n += 1
        fork(s1, s2)
        for _ in range(8):
            with torch.cuda.stream(s1): narrow(a, 12)
            prepare_batch()
            with torch.cuda.stream(s2): narrow(b, 12)
            prepare_batch()
        join(s1, s2)
    """,
    "ok_two_threads": """
        a, b, s1, s2 = rows(), rows(), torch.cuda.Stream(), torch.cuda.Stream()
        fork(s1, s2)
        def run(m, s):
            with torch.cuda.stream(s):
                for _ in range(60):
                    narrow(m); n = 0
                    for i in range(3000): n += i
        threads = [threading.Thread(target=run, args=(m, s)) for m, s in zip((a, b), (s1, s2))]
        [t.start() for t in threads]; [t.join() for t in threads]
        join(s1, s2)
    """,
    "same_direction_copies": """
        h = [torch.randn(4096, 4096, pin_memory=True) for _ in range(2)]
        d = [torch.empty(4096, 4096, device="cuda") for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        fork(*streams)
        for _ in range(5):
            for host, device, s in zip(h, d, streams):
                with torch.cuda.stream(s): device.copy_(host, non_blocking=True)
        join(*streams)
    """,
    "two_good_copies": """
        a, h = rows(), torch.randn(4096, 4096).pin_memory()
        d, u = torch.randn(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
        o = torch.empty(4096, 4096, pin_memory=True)
        s1, s2, s3 = [torch.cuda.Stream() for _ in range(3)]
        fork(s1, s2, s3)
        for _ in range(5):
            with torch.cuda.stream(s1): narrow(a)
            with torch.cuda.stream(s2): u.copy_(h, non_blocking=True)
            with torch.cuda.stream(s3): o.copy_(d, non_blocking=True)
        join(s1, s2, s3)
    """,
    "forward_after_backward_join": """
        f, g, x = mlp(), mlp(), torch.rand(16, 1024, device="cuda", requires_grad=True)
        s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
        s1.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s1): loss = g(x).square().mean()
        fork(s1, s2)
        with torch.cuda.stream(s1): loss.backward()
        join(s1, s2)
    """,
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_found_and_its_mended_form_is_not(name):
    faulty, mended = CASES[name]
    assert_found_where_marked(faulty, head=HEAD)
    assert "# ->" not in mended
    assert_found_where_marked(mended, head=HEAD)


@pytest.mark.parametrize("name", SILENT)
def test_what_does_not_show_in_the_source_gets_no_finding(name):
    assert_found_where_marked(SILENT[name], head=HEAD)
