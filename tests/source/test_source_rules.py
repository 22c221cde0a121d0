"""Each rule finds its forms on the exact line, and leaves near ones alone.

The marks catch both mistakes: a form that is missed, and an alarm on a line without a mark.
"""

from __future__ import annotations

import ast

import pytest
from marked import assert_found_where_marked

from torchweave.source import rules

FORMS = {
    # ---------------------------------------------------------------- timed_without_sync
    "timed: readings around a product": """
        a = torch.randn(9, 9, device="cuda")
        begin = time.time()
        b = a @ a
        print(time.time() - begin)  # -> timed_without_sync
    """,
    "timed: the clock and the work in helpers": """
        from time import perf_counter as now
        def clock():
            return now()  # -> timed_without_sync
        def work(x):
            return torch.mm(x, x)
        def measure():
            x = torch.ones(9, 9).cuda()
            begin = clock()
            work(x)
            return clock() - begin
    """,
    "timed: a timer as a class": """
        class Timer:
            def __enter__(self):
                self.begin = time.monotonic()
                return self
            def __exit__(self, *args):
                self.seconds = time.monotonic() - self.begin  # -> timed_without_sync
        x = torch.ones(9, device="cuda")
        with Timer() as timer:
            y = x.exp()
    """,
    "timed: a timer as a generator": """
        import contextlib
        @contextlib.contextmanager
        def timer(name):
            begin = time.perf_counter()
            yield
            print(name, time.perf_counter() - begin)  # -> timed_without_sync
        def main():
            x = torch.ones(9, device="cuda")
            with timer("exp"):
                x.exp()
    """,
    "timed: subtracted in place": """
        x = torch.ones(9, device="cuda")
        begin = time.time()
        x.exp()
        taken = time.time()  # -> timed_without_sync
        taken -= begin
    """,
    "timed: timeit of a lambda": """
        import timeit
        x = torch.ones(9, device="cuda")
        print(timeit.timeit(lambda: x.exp(), number=100))  # -> timed_without_sync
    """,
    "timed: synchronized after the second reading": """
        x = torch.ones(9, device="cuda")
        begin = time.perf_counter()
        x.exp()
        end = time.perf_counter()  # -> timed_without_sync
        torch.cuda.synchronize()
        print(end - begin)
    """,
    "not timed: synchronized": """
        x = torch.ones(9, device="cuda")
        begin = time.time()
        x.exp()
        torch.cuda.synchronize()
        print(time.time() - begin)
    """,
    "not timed: synchronized in a helper, by an event, by an operator": """
        def settle():
            torch.cuda.synchronize()
        x = torch.ones(9, device="cuda")
        begin = time.time()
        x.exp()
        settle()
        first = time.time() - begin
        done = torch.cuda.Event()
        begin = time.time()
        x.exp()
        done.record()
        done.synchronize()
        second = time.time() - begin
        begin = time.time()
        total = x.exp().sum().item()
        third = time.time() - begin
    """,
    "not timed: work on the CPU, and no work": """
        x = torch.ones(9, 9)
        begin = time.time()
        y = x @ x
        print(time.time() - begin)
        z = x.cuda()
        begin = time.time()
        print("nothing")
        print(time.time() - begin)
    """,
    "not timed: a call into another file may wait": """
        from elsewhere import train
        x = torch.ones(9, device="cuda")
        begin = time.time()
        x.exp()
        train(x)
        print(time.time() - begin)
    """,
    "not timed: a method of a model may wait": """
        def infer(model, x):
            model = model.to("cuda")
            begin = time.time()
            out = model.inference(x.cuda())
            print(time.time() - begin)
    """,
    "not timed: meant to be the time of launching": """
        x = torch.ones(9, device="cuda")
        begin = time.time()
        x.exp()
        launch_s = time.time() - begin
        def host_us():
            begin = time.perf_counter()
            x.exp()
            return (time.perf_counter() - begin) * 1e6
        print(host_us())
    """,
    "not timed: synchronized in one branch": """
        def measure(x, gpu):
            x = x.to("cuda")
            begin = time.time()
            y = x.exp()
            if gpu:
                torch.cuda.synchronize()
            return time.time() - begin
    """,
    # ---------------------------------------------------------------- backward_on_forward_stream
    "backward: of a loss that was made outside": """
        net = torch.nn.Linear(9, 9).cuda()
        side = torch.cuda.Stream()
        loss = net(torch.ones(9, device="cuda")).sum()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss.backward()  # -> backward_on_forward_stream
    """,
    "backward: of a parameter, with a context of another name": """
        from torch.cuda import stream as on
        def step(chunk, x, loss, side):
            side.wait_stream(torch.cuda.current_stream())
            with on(side):
                loss.backward()  # -> backward_on_forward_stream
            return chunk(x)
    """,
    "backward: through a scaler, and by a framework": """
        def step(scaler, accelerator, x, chunk, side):
            loss = chunk(x).sum()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                scaler.scale(loss).backward()  # -> backward_on_forward_stream
                accelerator.backward(loss)  # -> backward_on_forward_stream
    """,
    "backward: autograd.grad in a helper": """
        def grads(loss, weights):
            return torch.autograd.grad(loss, weights)  # -> backward_on_forward_stream
        def main():
            w = torch.ones(9, device="cuda", requires_grad=True)
            side = torch.cuda.Stream()
            loss = w.square().sum()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                grads(loss, [w])
    """,
    "not backward: the forward is under the same stream": """
        net = torch.nn.Linear(9, 9).cuda()
        x = torch.ones(9, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                net(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
    """,
    "not backward: no side stream, or the current one": """
        def step(loss):
            loss.backward()
            with torch.cuda.stream(torch.cuda.current_stream()):
                loss.backward()
    """,
    "not backward: two methods under one stream": """
        class Stage:
            def forward(self, x):
                with torch.cuda.stream(self.side):
                    return self.module(x)
            def backward_step(self, loss):
                with torch.cuda.stream(self.side):
                    loss.backward()
    """,
    # ---------------------------------------------------------------- missing_wait
    "wait: for itself": """
        def step(x, side):
            with torch.cuda.stream(side):
                side.wait_stream(torch.cuda.current_stream())  # -> missing_wait
                x.exp()
    """,
    "wait: for itself, by names": """
        class Prefetcher:
            def __init__(self):
                self.stream = torch.cuda.Stream()
            def load(self, batch):
                with torch.cuda.stream(self.stream):
                    current = torch.cuda.current_stream()
                    current.wait_stream(self.stream)  # -> missing_wait
    """,
    "wait: a side stream uses a tensor of outside": """
        side = torch.cuda.Stream()
        x = torch.ones(9, device="cuda")
        with torch.cuda.stream(side):
            y = x.exp()  # -> missing_wait
        torch.cuda.current_stream().wait_stream(side)
    """,
    "wait: a result is used outside": """
        def step(x, side):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = torch.exp(x)
            return y + 1  # -> missing_wait
    """,
    "wait: between two side streams": """
        def step(x, s1, s2):
            with torch.cuda.stream(s1):
                y = torch.exp(x)
            with torch.cuda.stream(s2):
                z = torch.exp(y)  # -> missing_wait
    """,
    "wait: a gradient from outside": """
        def step(x, module, side):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = torch.exp(x)
            g = torch.ones_like(y, device="cuda")
            with torch.cuda.stream(side):
                y.backward(gradient=g)  # -> missing_wait
    """,
    "wait: printing a result": """
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = torch.ones(9, device="cuda").exp()
        print(y)  # -> missing_wait
    """,
    "wait: deleted while the other stream reads": """
        def step(side):
            x = torch.ones(9, device="cuda").exp()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2  # -> missing_wait
            del x
            torch.cuda.current_stream().wait_stream(side)
            return y
    """,
    "wait: a helper's tensor goes at its end": """
        def send(x, host, side):
            y = torch.exp(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(y, non_blocking=True)  # -> missing_wait
    """,
    "wait: a loop leaves a result for its next turn": """
        def run(data, side):
            last = None
            for batch in data:
                if last is not None:
                    last.add_(1)  # -> missing_wait
                with torch.cuda.stream(side):
                    last = torch.exp(batch)
    """,
    "not wait: waits by streams, events and the host": """
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.ones(9, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.exp()
            ready = side.record_event()
        other.wait_event(ready)
        with torch.cuda.stream(other):
            z = y.exp()
            done = torch.cuda.Event()
            done.record()
        done.wait()
        print(z)
        with torch.cuda.stream(side):
            z = x.exp()
        torch.cuda.synchronize()
        print(z)
    """,
    "not wait: through a stream in between": """
        def step(x, a, b):
            a.wait_stream(torch.cuda.current_stream())
            y = torch.exp(x)
            a.wait_stream(torch.cuda.current_stream())
            b.wait_stream(a)
            with torch.cuda.stream(b):
                z = y + 1
            torch.cuda.current_stream().wait_stream(b)
            return z + 1
    """,
    "not wait: the outer stream was taken outside": """
        def step(side):
            x = torch.ones(9, device="cuda")
            outer = torch.cuda.current_stream()
            with torch.cuda.stream(side):
                side.wait_stream(outer)
                y = x.exp()
            outer.wait_stream(side)
            return y + 1
    """,
    "not wait: what comes from elsewhere": """
        def step(x, side):
            with torch.cuda.stream(side):
                y = torch.exp(x)
            return y
    """,
    "not wait: streams of a list wait in a loop": """
        def step(streams):
            x = torch.ones(9, device="cuda")
            for s in streams:
                s.wait_stream(torch.cuda.current_stream())
            for i, s in enumerate(streams):
                with torch.cuda.stream(s):
                    y = x.exp()
            for s in streams:
                torch.cuda.current_stream().wait_stream(s)
            return y + 1
    """,
    "not wait: one of two streams, by a condition": """
        def step(side, overlap):
            x = torch.ones(9, device="cuda")
            stream = side if overlap else torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                y = x.exp()
            return y + 1
    """,
    "not wait: recorded, or waited for before it goes": """
        def step(side):
            x = torch.ones(9, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2
                x.record_stream(side)
            del x
            z = y.new_ones(3)
            w = torch.ones(9, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                v = w * 2
            torch.cuda.current_stream().wait_stream(side)
            del w
            return v
    """,
    "not wait: written on a side stream in another branch": """
        def step(x, side, reduce):
            grad = x.clone()
            if reduce:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    grad = torch.exp(x)
                    grad.div_(2)
                torch.cuda.current_stream().wait_stream(side)
            else:
                print(torch.isnan(grad))
    """,
    "not wait: an event is handed to what uses the tensor": """
        def step(self, x, side):
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            q = torch.exp(x)
            ready = current.record_event()
            with torch.cuda.stream(side):
                out = self.indexer(q=q, ready=ready)
    """,
    "not wait: what may be left from the turn before": """
        def run(parts, kind, model):
            for part in parts:
                context = model.context(part)
                torch.cuda.set_stream(context.stream)
                if kind == "silu":
                    out = F.silu(part)
                elif kind == "gelu":
                    out = F.gelu(part)
                out *= 2
    """,
    "not wait: other memory under the same name": """
        def restore(ref, host, side):
            side.wait_stream(torch.cuda.current_stream())
            view = torch.tensor([], device="cuda")
            view.set_(ref.untyped_storage())
            with torch.cuda.stream(side):
                view.copy_(host, non_blocking=True)
    """,
    "not wait: a blocking upload is done when it returns": """
        def copy(numbers, host, side):
            index = torch.tensor(numbers, device="cuda")
            other = torch.tensor(numbers, device=host.device)
            whole = torch.randn(9, 9).cuda() + 0
            side.wait_stream(torch.cuda.current_stream())
            again = torch.tensor(numbers, device=host.device)
            with torch.cuda.stream(side):
                host.copy_(whole[index].index_select(0, other).index_select(0, again), non_blocking=True)
            side.synchronize()
    """,
    "not wait: sizes are no uses": """
        def step(x, side):
            with torch.cuda.stream(side):
                y = torch.exp(x)
            print(y.shape, y.size(0), y.device, y.numel())
            return y
    """,
    # ---------------------------------------------------------------- host_sync, explicit_sync
    "sync: operators in a loop with streams": """
        def run(side):
            x = torch.ones(9, device="cuda")
            for _ in range(9):
                with torch.cuda.stream(side):
                    torch.ones(9, device="cuda").exp()
                y = x.exp()
                a = y.sum().item()  # -> host_sync
                b = y.tolist()  # -> host_sync
                c = y.cpu()  # -> host_sync
                d = y[y > 0]  # -> host_sync
                e = torch.nonzero(y)  # -> host_sync
                print(y.sum())  # -> host_sync
                f = float(y.mean())  # -> host_sync
                if y.max() > 3:  # -> host_sync
                    pass
    """,
    "sync: explicit, in a loop with streams": """
        def settle():
            torch.cuda.synchronize()  # -> explicit_sync
        def run(a, b, side):
            while True:
                with torch.cuda.stream(side):
                    torch.exp(a)
                settle()
                torch.exp(b)
                with torch.cuda.stream(side):
                    torch.exp(a)
                side.synchronize()  # -> explicit_sync
    """,
    "sync: after the downloads to a list": """
        def run(batches, side):
            for batch in batches:
                with torch.cuda.stream(side):
                    loss = F.relu(batch).sum()
                    losses = [loss.item()]  # -> host_sync
    """,
    "not sync: no streams, after the loop, now and then, on the CPU": """
        def run(side):
            x = torch.ones(9, device="cuda")
            for _ in range(9):
                x.exp().sum().item()
                torch.cuda.synchronize()
            for step in range(9):
                with torch.cuda.stream(side):
                    torch.ones(9, device="cuda").exp()
                if step % 100 == 0:
                    print(x.sum().item())
                    torch.cuda.synchronize()
                host = torch.ones(3).sum().item()
            torch.cuda.synchronize()
            return x.sum().item()
    """,
    "not sync: a loop that measures": """
        def run(a, side):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(9):
                begin.record()
                with torch.cuda.stream(side):
                    torch.exp(a)
                end.record()
                torch.cuda.synchronize()
                print(begin.elapsed_time(end))
    """,
    "not sync: all of it on one side stream": """
        def run(side, loader):
            x = torch.ones(9, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(9):
                    print(x.exp().sum().item())
    """,
    "not sync: cases that are written out": """
        def run(x, side):
            for start in (0, 2):
                with torch.cuda.stream(side):
                    torch.exp(x)
                torch.cuda.synchronize()
    """,
    "not sync: the host reads what was copied to it": """
        def run(chunks, buffer, side):
            for chunk in chunks:
                with torch.cuda.stream(side):
                    buffer.copy_(chunk, non_blocking=True)
                side.synchronize()
                send(buffer)
    """,
    # ---------------------------------------------------------------- wide_dependency
    "dependency: waited for in the next line": """
        def step(x):
            work = dist.all_reduce(x, async_op=True)
            work.wait()  # -> wide_dependency
    """,
    "dependency: waited for on the call": """
        from torch.distributed import all_gather_into_tensor
        def step(out, x):
            all_gather_into_tensor(out, x, async_op=True).wait()  # -> wide_dependency
    """,
    "dependency: if there is a handle": """
        def step(x, group):
            work = dist.reduce_scatter_tensor(x, x, group=group, async_op=True)
            if work is not None:
                work.wait()  # -> wide_dependency
    """,
    "not dependency: work between": """
        def step(x, y):
            work = dist.all_reduce(x, async_op=True)
            z = torch.exp(y)
            work.wait()
    """,
    "not dependency: several at once, synchronous, with a limit": """
        def step(xs, x, timeout):
            works = [dist.all_reduce(one, async_op=True) for one in xs]
            for work in works:
                work.wait()
            dist.all_reduce(x)
            first = dist.all_reduce(xs[0], async_op=True)
            second = dist.all_reduce(xs[1], async_op=True)
            first.wait()
            dist.all_reduce(x, async_op=True).wait(timeout)
    """,
    "not dependency: calls into other files between, or another collective": """
        def step(layers, x, y):
            first = dist.all_reduce(x, async_op=True)
            layers[1].query(y)
            first.wait()
            a = dist.all_gather_into_tensor(x, y, async_op=True)
            b = dist.all_gather_into_tensor(y, x, async_op=True)
            b.wait()
            a.wait()
    """,
    "not dependency: whoever iterates goes on between": """
        def broadcast(x):
            handle = dist.broadcast(x, src=0, async_op=True)
            yield
            handle.wait()
    """,
    "not dependency: between CPUs": """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(9), async_op=True).wait()
    """,
    # ---------------------------------------------------------------- pageable_copy
    "pageable: made on the host": """
        h = torch.randn(4096, 4096)
        a = h.to("cuda", non_blocking=True)  # -> pageable_copy
        b = h.cuda(non_blocking=True)  # -> pageable_copy
        d = torch.empty(4096, 4096, device="cuda")
        d.copy_(h, non_blocking=True)  # -> pageable_copy
    """,
    "pageable: a loader that does not pin": """
        from torch.utils.data import DataLoader
        def run(dataset, device):
            loader = DataLoader(dataset, batch_size=8, shuffle=True)
            for step, (x, y) in enumerate(loader):
                x = x.to("cuda:0", non_blocking=True)  # -> pageable_copy
    """,
    "not pageable: pinned": """
        from torch.utils.data import DataLoader
        h = torch.randn(4096, 4096, pin_memory=True)
        a = h.to("cuda", non_blocking=True)
        b = torch.randn(4096, 4096).pin_memory().cuda(non_blocking=True)
        for x in DataLoader(data, pin_memory=True):
            x = x.to("cuda", non_blocking=True)
    """,
    "not pageable: from elsewhere, small, blocking, or made on the device": """
        def run(batch):
            a = batch.to("cuda", non_blocking=True)
            b = torch.tensor([1, 2]).to("cuda", non_blocking=True)
            c = torch.zeros(16).cuda(non_blocking=True)
            d = torch.randn(4096, 4096).to("cuda")
            with torch.device("cuda"):
                e = torch.randn(4096, 4096)
            f = e.to("cuda", non_blocking=True)
    """,
    # ---------------------------------------------------------------- pinned_alloc, device_alloc
    "alloc: pinned in every turn": """
        def run(data, side):
            for batch in data:
                h = batch.pin_memory()  # -> pinned_alloc
                x = h.to("cuda", non_blocking=True)
            for batch in data:
                h = torch.empty(4096, 4096, pin_memory=True)  # -> pinned_alloc
                with torch.cuda.stream(side):
                    x = h.cuda(non_blocking=True)
    """,
    "alloc: the cache is emptied in every turn": """
        from torch import cuda
        def tidy():
            cuda.empty_cache()  # -> device_alloc
        def run(data):
            net = torch.nn.Linear(9, 9).cuda()
            for batch in data:
                net(batch.cuda()).sum().backward()
                torch.cuda.empty_cache()  # -> device_alloc
            while True:
                net(data[0].cuda())
                tidy()
    """,
    "not alloc: before the loop, into a pool, under a condition": """
        def run(data, pool):
            h = torch.empty(4096, 4096, pin_memory=True)
            buffers = [torch.empty(9, pin_memory=True) for _ in range(9)]
            for n in range(9):
                pool.append(torch.empty(n, pin_memory=True))
                pool[n] = torch.empty(n, pin_memory=True)
                torch.ones(9, device="cuda").exp()
            for batch in data:
                if h is None:
                    h = batch.pin_memory()
                x = h.to("cuda", non_blocking=True)
    """,
    "not alloc: a benchmark's cases": """
        def bench(x):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            x.exp()
            torch.cuda.synchronize()
            return time.perf_counter() - begin
        def main(shapes):
            for shape in shapes:
                torch.cuda.empty_cache()
                print(bench(torch.ones(shape, device="cuda")))
    """,
    "not alloc: a constructor's buffers": """
        class Offload:
            def __init__(self, parameters):
                self.host = {}
                for p in parameters:
                    h = torch.empty_like(p, device="cpu", pin_memory=True)
                    h.copy_(torch.exp(p), non_blocking=True)
                    self.host[p] = h
    """,
    "not alloc: once an epoch, after an error, now and then": """
        def run(data, net):
            for epoch in range(9):
                for step, batch in enumerate(data):
                    try:
                        x = batch.cuda().exp()
                    except RuntimeError:
                        torch.cuda.empty_cache()
                    if step % 50 == 0:
                        torch.cuda.empty_cache()
                torch.cuda.empty_cache()
    """,
    # ---------------------------------------------------------------- stream_alias
    "alias: made in every turn": """
        def run(data):
            for batch in data:
                side = torch.cuda.Stream()  # -> stream_alias
                with torch.cuda.stream(side):
                    torch.exp(batch)
            while True:
                with torch.cuda.stream(torch.cuda.Stream(priority=-1)):  # -> stream_alias
                    torch.exp(data[0])
    """,
    "alias: more than the pool has": """
        streams = [torch.cuda.Stream() for _ in range(33)]  # -> stream_alias
        for _ in range(64):
            streams.append(torch.cuda.Stream())  # -> stream_alias
    """,
    "not alias: few, one for each device, or a pool of unknown size": """
        a = [torch.cuda.Stream() for _ in range(32)]
        for _ in range(4):
            s = torch.cuda.Stream()
        def pool(number, devices):
            streams = [torch.cuda.Stream() for _ in range(number)]
            per = {d: torch.cuda.Stream(device=d) for d in devices}
            for d in devices:
                per[d] = torch.cuda.Stream(d)
            while len(streams) < number:
                streams.append(torch.cuda.Stream())
            return streams, per
    """,
    "not alias: to capture graphs on, called for each candidate": """
        def tune(run):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                run()
            graph = torch.cuda.CUDAGraph()
        def all_of_them(candidates):
            for one in candidates:
                tune(one)
    """,
    "not alias: a benchmark's cases": """
        def bench(size):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                torch.ones(size, device="cuda")
        def main():
            for a in (1, 2, 3, 4, 5, 6):
                for b in (1, 2, 3, 4, 5, 6):
                    bench(a * b)
    """,
    "not alias: made once": """
        def run(data):
            side = torch.cuda.Stream()
            for batch in data:
                if side is None:
                    side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    torch.exp(batch)
    """,
    # ---------------------------------------------------------------- the environment
    "environment: one connection, and blocking launches": """
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # -> max_connections
        os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")  # -> launch_blocking
        os.putenv("CUDA_LAUNCH_BLOCKING", "1")  # -> launch_blocking
        os.environ.update({"CUDA_DEVICE_MAX_CONNECTIONS": str(1)})  # -> max_connections
    """,
    "environment: too late": """
        def main():
            x = torch.ones(9, device="cuda")
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # -> max_connections
            os.environ["CUDA_LAUNCH_BLOCKING"] = "0"  # -> launch_blocking
        main()
    """,
    "not environment: in time, of another process, another variable": """
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        os.environ["CUDA_LAUNCH_BLOCKING"] = "0"
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        env = dict(os.environ)
        env["CUDA_LAUNCH_BLOCKING"] = "1"
        if os.environ["CUDA_LAUNCH_BLOCKING"] == "1":
            print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"))
    """,
    "not environment: available is no context": """
        if torch.cuda.is_available() and torch.cuda.device_count() > 1:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    """,
    # ---------------------------------------------------------------- no_such_call
    "no such call: names that answers on the web hold": """
        import torch.cuda as tc
        torch.cuda.async_copy_to_device(x, 0)  # -> no_such_call
        tc.async_copy_from_device(x, "cpu")  # -> no_such_call
        s = tc.create_stream()  # -> no_such_call
    """,
    "no such call: methods and arguments": """
        side, other, done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        x = torch.ones(9, device="cuda")
        side.wait(other)  # -> no_such_call
        done.wait_stream(side)  # -> no_such_call
        torch.cuda.synchronize(side)  # -> no_such_call
        y = torch.mm(x, x, stream=side)  # -> no_such_call
        third = torch.cuda.Stream(non_blocking=True)  # -> no_such_call
    """,
    "not no such call: what exists, is private, or is not torch's": """
        import cupy
        torch.cuda.current_stream().wait_event(torch.cuda.Event())
        torch.cuda._sleep(9)
        torch.cuda.memory_stats()
        torch.cuda.nvtx.range_push("x")
        torch.cuda.synchronize(0)
        cupy.cuda.create_stream()
        torch.cuda.get_stream_from_external(0, 0).wait_stream(torch.cuda.Stream())
    """,
    "not no such call: asked for first": """
        if hasattr(torch.cuda, "brand_new"):
            torch.cuda.brand_new()
    """,
    # ---------------------------------------------------------------- kinds of false alarms in code that was new
    "timed: work that was waited for, and a little after it": """
        def decode(vae, z):
            begin = time.perf_counter()
            out = torch.mm(z.cuda(), z.cuda())
            torch.cuda.synchronize()
            return out.float(), time.perf_counter() - begin
        def only_before():
            x = torch.ones(9, 9, device="cuda")
            begin = time.perf_counter()
            torch.cuda.synchronize()
            y = x @ x
            return time.perf_counter() - begin  # -> timed_without_sync
    """,
    "timed: a blocking upload is no wait for the work": """
        def step(batch):
            begin = time.perf_counter()
            x = torch.ones(9, 9).cuda()
            y = x @ x
            return time.perf_counter() - begin  # -> timed_without_sync
    """,
    "timed: the other branch of a test for CUDA": """
        def measure(func, use_cuda, device):
            start = torch.cuda.Event(enable_timing=True)
            x = torch.ones(9, 9, device="cuda")
            if use_cuda:
                start.record()
            else:
                begin = time.time()
            y = x @ x
            if not use_cuda or device == "cpu":
                print(time.time() - begin)
            if device.type == "cuda":
                begin = time.time()
                y = x @ x
                print(time.time() - begin)  # -> timed_without_sync
            elif device.type != "cuda":
                begin = time.time()
                y = x @ x
                print(time.time() - begin)
    """,
    "timed: messages between hosts": """
        def offset(peer, group, cpu_group):
            side = torch.cuda.Stream()
            message = torch.zeros(1, dtype=torch.int64)
            begin = time.perf_counter_ns()
            dist.send(message, peer, group=group)
            print(time.perf_counter_ns() - begin)
            begin = time.perf_counter_ns()
            dist.all_reduce(unknown, group=cpu_group)
            print(time.perf_counter_ns() - begin)
    """,
    "missing: the surrounding stream, kept when the object was made": """
        class Pipe:
            def __init__(self):
                self.main = torch.cuda.current_stream()
                self.side = torch.cuda.Stream()
            def good(self, x):
                with torch.cuda.stream(self.side):
                    self.side.wait_stream(self.main)
                    dist.broadcast(x, src=0)
            def bad(self, x):
                with torch.cuda.stream(self.side):
                    self.side.wait_stream(torch.cuda.current_stream())  # -> missing_wait
                    dist.broadcast(x, src=0)
    """,
    "missing: a function that gives what it gave before": """
        from functools import lru_cache
        @lru_cache
        def stream_of(device):
            return torch.cuda.Stream(device=device)
        def fresh(device):
            return torch.cuda.Stream(device=device)
        def work(devices):
            main = stream_of(devices[0])
            with torch.cuda.stream(main):
                x = torch.ones(9, device="cuda")
            other = stream_of(devices[1])
            with torch.cuda.stream(other):
                y = x + 1
            with torch.cuda.stream(fresh(0)):
                z = y + 1  # -> missing_wait
    """,
    "missing: memory that is wrapped where it is": """
        def plugin(outputs, inputs, pointer):
            targets = torch.as_tensor(outputs, device="cuda")
            source = torch.ones(9, device="cuda")
            with torch.cuda.stream(torch.cuda.ExternalStream(pointer)):
                targets.copy_(inputs)
                y = source + 1  # -> missing_wait
    """,
    "pageable: what its names call small, and wrapped memory that goes who knows where": """
        import numpy as np
        def upload(cu_seqlens, array, device):
            a = torch.from_numpy(np.concatenate([array, array]))
            b = torch.from_numpy(cu_seqlens).to("cuda", non_blocking=True)
            cu_seqlens = torch.from_numpy(np.concatenate([array])).to("cuda", non_blocking=True)
            c = torch.from_numpy(array).to(device, non_blocking=True)
            d = torch.from_numpy(array).to("cuda", non_blocking=True)  # -> pageable_copy
            return a.to("cuda", non_blocking=True)  # -> pageable_copy
    """,
    "alloc: the parts of a model, one after the other": """
        from tqdm import tqdm
        def tables(groups):
            for name, rows in groups.items():
                host = torch.zeros(rows, pin_memory=True)
                x = host.to("cuda", non_blocking=True)
                y = x + 1
        def quantize(model):
            for index, block in tqdm(enumerate(model.layers), total=3):
                y = torch.ones(9, device="cuda") @ torch.ones(9, device="cuda")
                torch.cuda.empty_cache()
            for index in range(len(model.blocks)):
                y = torch.ones(9, device="cuda") @ torch.ones(9, device="cuda")
                torch.cuda.empty_cache()
            for index in range(len(model.batches)):
                y = torch.ones(9, device="cuda") @ torch.ones(9, device="cuda")
                torch.cuda.empty_cache()  # -> device_alloc
    """,
    "alloc: somebody else measures each case": """
        def main(sizes):
            for size in sizes:
                torch.cuda.empty_cache()
                x = torch.ones(size, device="cuda")
                print(do_bench(lambda: x + 1))
        def benchmark_sizes(sizes):
            for size in sizes:
                x = torch.ones(size, device="cuda") + 1
                torch.cuda.empty_cache()
    """,
    "blocking: a switch that asks for it": """
        def setup(args, blocking):
            if args.debug:
                os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
            if os.environ.get("MY_PROFILE") == "1":
                os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
            if args.fast:
                os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # -> launch_blocking
    """,
    "invention: asked for elsewhere in the file": """
        def check():
            if not hasattr(torch.cuda, "run_on_streams"):
                raise RuntimeError
        def use(streams):
            torch.cuda.run_on_streams(streams)
            torch.cuda.run_on_threads(streams)  # -> no_such_call
    """,
    "missing: streams by a computed index, and of another accelerator": """
        POOL = []
        def streams_of(count):
            while len(POOL) < count:
                POOL.append(torch.cuda.Stream())
            return POOL[:count]
        def fork(x, thunks):
            streams = streams_of(len(thunks))
            y = torch.ones(9, device="cuda")
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for index, thunk in enumerate(thunks):
                with torch.cuda.stream(streams[index - 1]):
                    z = y + index
        class Pipeline:
            def denoise(self, ht):
                y = torch.ones(9)
                begin = time.time()
                with self.ht.hpu.stream(self.hpu_stream):
                    z = torch.cat([y, y])
                    self.side = torch.npu.Stream()
                print(time.time() - begin)
    """,
    "alias: a stream for each part of a model": """
        def split(model):
            for block in model.blocks:
                block.set_group(stream=torch.cuda.Stream())
            for batch in model.batches:
                block.set_group(stream=torch.cuda.Stream())  # -> stream_alias
    """,
    "missing: what is captured by hand does not run yet": """
        def capture(library, device):
            t = torch.zeros(9, device="cuda")
            stream = library.stream_to_torch(device)
            with torch.cuda.stream(stream):
                library.capture_begin()
                t += 1.0
                graph = library.capture_end()
            library.launch(graph)
            return (t == 1.0).all()
    """,
    "missing: a function of elsewhere that gives streams by an index": """
        from library import get_stream
        def fork(devices, pool):
            main = get_stream(devices[0])
            with torch.cuda.stream(main):
                x = torch.ones(9, device="cuda")
            for device in devices:
                stream = get_stream(device)
                with torch.cuda.stream(stream):
                    y = x + 1
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                z = y + 1  # -> missing_wait
    """,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_found_on_its_line_and_nothing_else(name):
    assert_found_where_marked(FORMS[name])


def test_every_rule_has_forms_that_are_found_and_near_ones_that_are_not():
    """A rule without both would be untested in one direction."""
    text = "\n".join(FORMS.values())
    for rule in rules.all_rules():
        marks = sum(row.count(rule.cause) for row in text.splitlines() if "# ->" in row)
        assert marks >= 2, f"{rule.cause}: {marks} forms"
    kinds = {
        "timed",
        "backward",
        "wait",
        "sync",
        "dependency",
        "pageable",
        "alloc",
        "alias",
        "environment",
        "no such call",
    }
    for kind in kinds:
        assert sum(name.startswith(f"not {kind}") for name in FORMS) >= 2, kind


@pytest.mark.parametrize("rule", rules.all_rules(), ids=lambda rule: rule.cause)
def test_a_rule_documents_what_it_finds_and_what_it_does_not(rule):
    assert rule.page.splitlines()[0].endswith(".")
    assert "**Found.**" in rule.page
    assert "**Not found.**" in rule.page


@pytest.mark.parametrize("name", [name for name in FORMS if not name.startswith("not ")])
def test_a_mend_is_code(name):
    """A mend that is no Python cannot be pasted."""
    from marked import HEAD

    from torchweave.source import check_source

    for finding in check_source(HEAD + __import__("textwrap").dedent(FORMS[name])):
        assert finding.mend
        ast.parse(finding.mend)
