"""The faults that `plant_faults.py` plants: each form is code with the culprit's line marked.

Written from the description of the rules and from public reports of the mistakes, not from what the rules find.
"""
# ruff: noqa: E501 (a fault reads best as the one line that it is in)

import random
from dataclasses import dataclass

CULPRIT = "# <- the fault"


@dataclass
class Style:
    """How the planted code writes things."""

    torch: str  # torch
    cuda: str  # torch.cuda
    stream: str  # torch.cuda.stream
    clock: str  # a clock
    dist: str
    imports: list[str]
    side: str  # a stream variable
    data: str  # a statement that makes the tensor x on the device


def a_style(rng: random.Random) -> Style:
    imports = []
    torch = rng.choice(["torch", "torch", "torch", "th"])
    imports.append("import torch" if torch == "torch" else "import torch as th")
    cuda, line = rng.choice(
        [
            (f"{torch}.cuda", ""),
            (f"{torch}.cuda", ""),
            ("tc", "import torch.cuda as tc"),
            ("cuda", "from torch import cuda"),
        ]
    )
    imports += [line] if line else []
    stream, line = rng.choice(
        [(f"{cuda}.stream", ""), (f"{cuda}.stream", ""), ("stream", "from torch.cuda import stream"),
         ("on_stream", "from torch.cuda import stream as on_stream")]
    )  # fmt: skip
    imports += [line] if line else []
    clock, line = rng.choice(
        [("time.time", "import time"), ("time.perf_counter", "import time"), ("time.monotonic", "import time"),
         ("now", "from time import perf_counter as now"), ("perf_counter", "from time import perf_counter"),
         ("t.time", "import time as t"), ("default_timer", "from timeit import default_timer")]
    )  # fmt: skip
    imports.append(line)
    dist, line = rng.choice(
        [("dist", "import torch.distributed as dist"), ("torch.distributed", "import torch.distributed")]
    )
    imports += [line, "import torch"] if dist == "torch.distributed" else [line]
    side = rng.choice(["side", "copy_stream", "s1", "self_stream", "comm"])
    data = rng.choice(
        [
            f'x = {torch}.randn(1024, 1024, device="cuda")',
            f"x = {torch}.randn(2048, 2048).cuda()",
            f'dev = {torch}.device("cuda")\nx = {torch}.ones(4096, 1024, device=dev)',
            f'dev = "cuda:0"\nx = {torch}.rand(512, 512, device=dev)',
            f'x = {torch}.zeros(4096, 64).to("cuda")',
            "x = inputs.cuda()\nx = x * 2",
        ]
    )
    return Style(torch, cuda, stream, clock, dist, imports, side, data)


@dataclass
class Fault:
    """One fault: its cause, its body (with the culprit's line marked), helpers, and whether it is a method's."""

    cause: str
    form: str
    body: str
    helpers: str = ""
    imports: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ("inputs",)


# -- host clocks


def timed(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["plain", "variables", "loop", "helper", "clock_helper", "synced_before", "module", "stream",
                       "timeit", "context", "attribute", "late_sync", "total", "nanoseconds"])  # fmt: skip
    work = rng.choice(
        [f"y = {s.torch}.mm(x, x)", "y = x @ x", f"y = {s.torch}.relu(x)", "y = x.matmul(x)", "y = x.exp().sum()"]
    )
    helpers, imports = "", ()
    if form == "plain":
        body = f"{s.data}\nbegin = {s.clock}()\n{work}\nprint('took', {s.clock}() - begin)  {CULPRIT}"
    elif form == "variables":
        body = (
            f"{s.data}\nbegin = {s.clock}()\n{work}\nend = {s.clock}()  {CULPRIT}\nlasted = end - begin\nprint(lasted)"
        )
    elif form == "loop":
        body = f"{s.data}\nbegin = {s.clock}()\nfor _ in range(100):\n    {work}\nend = {s.clock}()  {CULPRIT}\nprint((end - begin) / 100)"
    elif form == "helper":
        helpers = f"def _planted_work(x):\n    {work}\n    return y\n"
        body = f"{s.data}\nbegin = {s.clock}()\nz = _planted_work(x)\nlasted = {s.clock}() - begin  {CULPRIT}"
    elif form == "clock_helper":
        helpers = f"def _planted_now():\n    return {s.clock}()  {CULPRIT}\n"
        body = f"{s.data}\nbegin = _planted_now()\n{work}\nlasted = _planted_now() - begin"
    elif form == "synced_before":
        body = f"{s.data}\n{s.cuda}.synchronize()\nbegin = {s.clock}()\n{work}\nlasted = {s.clock}() - begin  {CULPRIT}"
    elif form == "module":
        body = (
            f"net = {s.torch}.nn.Linear(64, 64).cuda()\n{s.data}\nbegin = {s.clock}()\nout = net(x)\nout.sum().backward()\n"
            f"lasted = {s.clock}() - begin  {CULPRIT}"
        )
    elif form == "stream":
        body = (
            f"{s.data}\n{s.side} = {s.cuda}.Stream()\n{s.cuda}.synchronize()\nbegin = {s.clock}()\nwith {s.stream}({s.side}):\n"
            f"    {work}\nlasted = {s.clock}() - begin  {CULPRIT}"
        )
    elif form == "timeit":
        imports = ("import timeit",)
        body = f"{s.data}\nlasted = timeit.timeit(lambda: {work[4:]}, number=10)  {CULPRIT}"
    elif form == "context":
        helpers = (
            f"class _PlantedTimer:\n    def __enter__(self):\n        self.begin = {s.clock}()\n        return self\n\n"
            f"    def __exit__(self, *args):\n        self.lasted = {s.clock}() - self.begin  {CULPRIT}\n"
        )
        body = f"{s.data}\nwith _PlantedTimer() as timer:\n    {work}\nprint(timer.lasted)"
    elif form == "attribute":
        helpers = "class _PlantedStats:\n    pass\n"
        body = f"{s.data}\nstats = _PlantedStats()\nstats.begin = {s.clock}()\n{work}\nstats.lasted = {s.clock}() - stats.begin  {CULPRIT}"
    elif form == "late_sync":
        body = f"{s.data}\nbegin = {s.clock}()\n{work}\nend = {s.clock}()  {CULPRIT}\n{s.cuda}.synchronize()\nlasted = end - begin"
    elif form == "total":
        body = f"{s.data}\ntotal = 0.0\nfor _ in range(20):\n    begin = {s.clock}()\n    {work}\n    total += {s.clock}() - begin  {CULPRIT}"
    else:
        imports = ("import time",)
        body = f"{s.data}\nbegin = time.perf_counter_ns()\n{work}\nlasted_us = (time.perf_counter_ns() - begin) / 1e3  {CULPRIT}"
    return Fault("timed_without_sync", form, body, helpers, imports)


# -- backward


def backward(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(
        ["visible", "parameter", "autograd_backward", "autograd_grad", "helper", "attribute", "grads", "scaled"]
    )
    net = f"net = {s.torch}.nn.Linear(64, 64).cuda()\n"
    forward = f"{net}{s.data}\nloss = net(x).square().mean()\n"
    stream = f"{s.side} = {s.cuda}.Stream()\n{s.side}.wait_stream({s.cuda}.current_stream())\n"
    helpers, parameters = "", ("inputs",)
    if form == "visible":
        body = f"{forward}{stream}with {s.stream}({s.side}):\n    loss.backward()  {CULPRIT}\nout = net(x)"
    elif form == "parameter":
        parameters = ("inputs", "loss")
        body = f"{stream}with {s.stream}({s.side}):\n    loss.backward()  {CULPRIT}\n{s.cuda}.current_stream().wait_stream({s.side})"
    elif form == "autograd_backward":
        body = f"{forward}{stream}with {s.stream}({s.side}):\n    {s.torch}.autograd.backward([loss])  {CULPRIT}"
    elif form == "autograd_grad":
        body = f"{forward}{stream}with {s.stream}({s.side}):\n    g = {s.torch}.autograd.grad(loss, list(net.parameters()))  {CULPRIT}"
    elif form == "helper":
        helpers = f"def _planted_step(value):\n    value.backward()  {CULPRIT}\n"
        body = f"{forward}{stream}with {s.stream}({s.side}):\n    _planted_step(loss)"
    elif form == "attribute":
        parameters = ("inputs", "holder", "loss")
        body = f"with {s.stream}(holder.planted_stream):\n    loss.backward()  {CULPRIT}\nholder.planted_out = holder.chunk(inputs)"
    elif form == "grads":
        parameters = ("inputs", "outputs", "grads")
        body = f"{stream}with {s.stream}({s.side}):\n    {s.torch}.autograd.backward(outputs, grads)  {CULPRIT}"
    else:
        parameters = ("inputs", "scaler")
        body = f"{forward}{stream}with {s.stream}({s.side}):\n    scaler.scale(loss).backward()  {CULPRIT}"
    return Fault("backward_on_forward_stream", form, body, helpers, (), parameters)


# -- waits


def waits(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["self_wait", "self_wait_named", "side_uses_outside", "outside_uses_side", "two_sides", "gradient",
                       "freed_del", "freed_anew", "recorded_not_waited", "waited_too_late", "helper", "free_at_end"])  # fmt: skip
    new = f"{s.side} = {s.cuda}.Stream()\n"
    fork = f"{s.side}.wait_stream({s.cuda}.current_stream())\n"
    join = f"{s.cuda}.current_stream().wait_stream({s.side})\n"
    op = rng.choice([f"y = {s.torch}.relu(w)", "y = w * 3", "y = w.cumsum(0)", f"y = {s.torch}.mm(w, w)"])
    helpers = ""
    if form == "self_wait":
        body = f"{s.data}\nw = x + 1\n{new}with {s.stream}({s.side}):\n    {s.side}.wait_stream({s.cuda}.current_stream())  {CULPRIT}\n    {op}\n{join}"
    elif form == "self_wait_named":
        body = f"{s.data}\nw = x + 1\n{new}with {s.stream}({s.side}):\n    inner = {s.cuda}.current_stream()\n    {s.side}.wait_stream(inner)  {CULPRIT}\n    {op}\n{join}"
    elif form == "side_uses_outside":
        body = f"{s.data}\n{new}w = x.square()\nwith {s.stream}({s.side}):\n    {op}  {CULPRIT}\n{join}"
    elif form == "outside_uses_side":
        body = f"{s.data}\nw = x.square()\n{new}{fork}with {s.stream}({s.side}):\n    {op}\nz = y + 1  {CULPRIT}"
    elif form == "two_sides":
        body = (
            f"{s.data}\nw = x.square()\n{new}other = {s.cuda}.Stream()\n{fork}other.wait_stream({s.cuda}.current_stream())\n"
            f"with {s.stream}({s.side}):\n    {op}\nwith {s.stream}(other):\n    z = y.sum()  {CULPRIT}\n{join}"
        )
    elif form == "gradient":
        body = (
            f"{s.data}\nnet = {s.torch}.nn.Linear(64, 64).cuda()\n{new}{fork}with {s.stream}({s.side}):\n    out = net(x)\n"
            f"g = {s.torch}.ones_like(x)\nwith {s.stream}({s.side}):\n    out.backward(gradient=g)  {CULPRIT}"
        )
    elif form == "freed_del":
        body = f"{s.data}\nw = x.square()\n{new}{fork}with {s.stream}({s.side}):\n    {op}  {CULPRIT}\ndel w\nz = x.exp()\n{join}"
    elif form == "freed_anew":
        body = f"{s.data}\nw = x.square()\n{new}{fork}with {s.stream}({s.side}):\n    {op}  {CULPRIT}\nw = None\nz = x.exp()\n{join}"
    elif form == "recorded_not_waited":
        body = (
            f"{s.data}\nw = x.square()\n{new}{fork}done = {s.cuda}.Event()\nwith {s.stream}({s.side}):\n    {op}\n    done.record()\n"
            f"z = y.sum()  {CULPRIT}\ndone.wait()"
        )
    elif form == "waited_too_late":
        body = f"{s.data}\nw = x.square()\n{new}with {s.stream}({s.side}):\n    {op}  {CULPRIT}\n{fork}{join}"
    elif form == "helper":
        helpers = f"def _planted_use(w):\n    {op}  {CULPRIT}\n    return y\n"
        body = f"{s.data}\nw = x.square()\n{new}with {s.stream}({s.side}):\n    z = _planted_use(w)\n{join}"
    else:
        helpers = (
            f"def _planted_copy(x, {s.side}, host):\n    w = x.square()\n    {s.side}.wait_stream({s.cuda}.current_stream())\n"
            f"    with {s.stream}({s.side}):\n        host.copy_(w, non_blocking=True)  {CULPRIT}\n"
        )
        body = f"{s.data}\n{new}host = {s.torch}.empty(1024, 1024, pin_memory=True)\n_planted_copy(x, {s.side}, host)"
    return Fault("missing_wait", form, body, helpers)


# -- the host waits


def host(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(
        ["item", "tolist", "cpu", "numpy", "mask", "nonzero", "print", "if", "float", "to_cpu", "helper", "select"]
    )
    line = {
        "item": "value = y.sum().item()", "tolist": "values = y.tolist()", "cpu": "h = y.cpu()",
        "numpy": "h = y.detach().cpu().numpy()", "mask": "z = y[y > 0]", "nonzero": f"i = {s.torch}.nonzero(y)",
        "print": "print('sum', y.sum())", "if": "if y.sum() > 0:", "float": "value = float(y.mean())",
        "to_cpu": 'h = y.to("cpu")', "helper": "_planted_log(y)", "select": f"z = {s.torch}.masked_select(y, y > 0)",
    }[form]  # fmt: skip
    tail = "\n        pass" if form == "if" else ""
    helpers = ""
    if form == "helper":
        helpers = f"def _planted_log(value):\n    return value.max().item()  {CULPRIT}\n"
        marked = line
    else:
        marked = f"{line}  {CULPRIT}{tail}"
    loop = rng.choice(["for _ in range(10):", "for number in range(len(inputs)):", "while True:"])
    body = (
        f"{s.data}\n{s.side} = {s.cuda}.Stream()\n{s.side}.wait_stream({s.cuda}.current_stream())\n{loop}\n"
        f"    with {s.stream}({s.side}):\n        z = x.cumsum(0)\n    y = x.square()\n    {marked}\n{s.cuda}.current_stream().wait_stream({s.side})"
    )
    return Fault("host_sync", form, body, helpers)


def explicit(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["device", "stream", "event", "helper", "current"])
    line = {
        "device": f"{s.cuda}.synchronize()", "stream": f"{s.side}.synchronize()", "event": "done.synchronize()",
        "helper": "_planted_settle()", "current": f"{s.cuda}.current_stream().synchronize()",
    }[form]  # fmt: skip
    helpers = f"def _planted_settle():\n    {s.cuda}.synchronize()  {CULPRIT}\n" if form == "helper" else ""
    marked = line if helpers else f"{line}  {CULPRIT}"
    body = (
        f"{s.data}\n{s.side} = {s.cuda}.Stream()\ndone = {s.cuda}.Event()\nfor _ in range(10):\n"
        f"    {s.side}.wait_stream({s.cuda}.current_stream())\n    with {s.stream}({s.side}):\n        z = x.cumsum(0)\n        done.record()\n"
        f"    {marked}\n    y = x.square()"
    )
    return Fault("explicit_sync", form, body, helpers)


# -- copies and allocations


def pageable(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["to", "cuda", "copy", "numpy", "loader", "device", "chained", "helper"])
    imports, helpers, parameters = (), "", ("inputs",)
    if form == "to":
        body = f'h = {s.torch}.randn(4096, 4096)\nd = h.to("cuda", non_blocking=True)  {CULPRIT}'
    elif form == "cuda":
        body = f"h = {s.torch}.zeros(4096, 4096)\nd = h.cuda(non_blocking=True)  {CULPRIT}"
    elif form == "copy":
        body = f'd = {s.torch}.empty(4096, 4096, device="cuda")\nh = {s.torch}.rand(4096, 4096)\nd.copy_(h, non_blocking=True)  {CULPRIT}'
    elif form == "numpy":
        imports = ("import numpy as np",)
        body = f'h = {s.torch}.from_numpy(np.asarray(inputs))\nd = h.to("cuda:0", non_blocking=True)  {CULPRIT}'
    elif form == "loader":
        imports = ("from torch.utils.data import DataLoader",)
        body = f'loader = DataLoader(inputs, batch_size=64)\nfor batch in loader:\n    d = batch.to("cuda", non_blocking=True)  {CULPRIT}\n    d.square_()'
    elif form == "device":
        body = f'dev = {s.torch}.device("cuda", 0)\nh = {s.torch}.ones(8192, 1024)\nd = h.to(device=dev, non_blocking=True)  {CULPRIT}'
    elif form == "chained":
        body = f'd = {s.torch}.randn(2048, 2048).to("cuda", non_blocking=True)  {CULPRIT}'
    else:
        helpers = f'def _planted_upload(h):\n    return h.to("cuda", non_blocking=True)  {CULPRIT}\n'
        body = f"h = {s.torch}.randn(4096, 4096)\nd = _planted_upload(h)"
    return Fault("pageable_copy", form, body, helpers, imports, parameters)


def pinned(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["method", "factory", "helper", "stream", "while"])
    helpers = ""
    if form == "method":
        body = f'for h in inputs:\n    p = h.pin_memory()  {CULPRIT}\n    d = p.to("cuda", non_blocking=True)\n    d.mul_(2)'
    elif form == "factory":
        body = f"for h in inputs:\n    p = {s.torch}.empty(4096, 4096, pin_memory=True)  {CULPRIT}\n    p.copy_(h)\n    d = p.cuda(non_blocking=True)"
    elif form == "helper":
        helpers = f"def _planted_pin(h):\n    return h.pin_memory()  {CULPRIT}\n"
        body = 'for h in inputs:\n    d = _planted_pin(h).to("cuda", non_blocking=True)\n    y = d * 2'
    elif form == "stream":
        body = f"{s.side} = {s.cuda}.Stream()\nfor h in inputs:\n    p = h.pin_memory()  {CULPRIT}\n    with {s.stream}({s.side}):\n        d = p.cuda(non_blocking=True)"
    else:
        body = f'source = iter(inputs)\nwhile True:\n    h = next(source)\n    p = h.pin_memory()  {CULPRIT}\n    d = p.to("cuda", non_blocking=True)\n    d.add_(1)'
    return Fault("pinned_alloc", form, body, helpers)


def emptied(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["for", "while", "training", "helper"])
    helpers = ""
    if form == "for":
        body = f"{s.data}\nfor _ in range(100):\n    y = x @ x\n    {s.cuda}.empty_cache()  {CULPRIT}"
    elif form == "while":
        body = f"{s.data}\nwhile True:\n    y = x.cumsum(0)\n    del y\n    {s.cuda}.empty_cache()  {CULPRIT}"
    elif form == "training":
        body = (
            f"net = {s.torch}.nn.Linear(64, 64).cuda()\nfor batch in inputs:\n    loss = net(batch.cuda()).sum()\n    loss.backward()\n"
            f"    {s.cuda}.empty_cache()  {CULPRIT}"
        )
    else:
        helpers = f"def _planted_tidy():\n    {s.cuda}.empty_cache()  {CULPRIT}\n"
        body = f"{s.data}\nfor _ in range(100):\n    y = x @ x\n    _planted_tidy()"
    return Fault("device_alloc", form, body, helpers)


# -- streams, environment, collectives, inventions


def alias(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["for", "while", "comprehension", "helper", "inline", "many"])
    helpers = ""
    if form == "for":
        body = f"for batch in inputs:\n    {s.side} = {s.cuda}.Stream()  {CULPRIT}\n    with {s.stream}({s.side}):\n        batch.cuda(non_blocking=True)"
    elif form == "while":
        body = f"{s.data}\nwhile True:\n    {s.side} = {s.cuda}.Stream(priority=-1)  {CULPRIT}\n    with {s.stream}({s.side}):\n        y = {s.torch}.rand(9, device='cuda')"
    elif form == "comprehension":
        body = f"streams = [{s.cuda}.Stream() for _ in range(48)]  {CULPRIT}"
    elif form == "helper":
        helpers = f"def _planted_stream():\n    return {s.cuda}.Stream()  {CULPRIT}\n"
        body = f"for batch in inputs:\n    with {s.stream}(_planted_stream()):\n        batch.cuda(non_blocking=True)"
    elif form == "inline":
        body = f"for batch in inputs:\n    with {s.stream}({s.cuda}.Stream()):  {CULPRIT}\n        batch.cuda(non_blocking=True)"
    else:
        body = f"streams = []\nfor _ in range(64):\n    streams.append({s.cuda}.Stream())  {CULPRIT}"
    return Fault("stream_alias", form, body, helpers)


def environment(rng: random.Random, s: Style) -> Fault:
    cause, name, value = rng.choice(
        [("max_connections", "CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("launch_blocking", "CUDA_LAUNCH_BLOCKING", "1")]
    )
    form = rng.choice(["item", "setdefault", "putenv", "update", "late", "from_import", "keyword"])
    imports = ("import os",)
    if form == "item":
        body = f'os.environ["{name}"] = "{value}"  {CULPRIT}'
    elif form == "setdefault":
        body = f'os.environ.setdefault("{name}", "{value}")  {CULPRIT}'
    elif form == "putenv":
        body = f'os.putenv("{name}", "{value}")  {CULPRIT}'
    elif form == "update":
        body = f'os.environ.update({{"{name}": "{value}"}})  {CULPRIT}'
    elif form == "keyword":
        body = f'os.environ.update({name}="{value}")  {CULPRIT}'
    elif form == "late":
        later = "32" if cause == "max_connections" else "0"
        body = f'{s.data}\nos.environ["{name}"] = "{later}"  {CULPRIT}'
    else:
        imports = ("from os import environ",)
        body = f'environ["{name}"] = str({value})  {CULPRIT}'
    return Fault(cause, form, body, "", imports)


def collective(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(["chained", "next", "gather", "from_import", "group", "all_to_all"])
    imports: tuple[str, ...] = ()
    if form == "chained":
        body = f"{s.data}\n{s.dist}.all_reduce(x, async_op=True).wait()  {CULPRIT}"
    elif form == "next":
        body = f"{s.data}\nwork = {s.dist}.all_reduce(x, async_op=True)\nwork.wait()  {CULPRIT}\ny = x * 2"
    elif form == "gather":
        body = f"{s.data}\nout = {s.torch}.empty(4096, 4096, device='cuda')\nhandle = {s.dist}.all_gather_into_tensor(out, x, async_op=True)\nhandle.wait()  {CULPRIT}"
    elif form == "from_import":
        imports = ("from torch.distributed import all_reduce",)
        body = f"{s.data}\nreq = all_reduce(x, async_op=True)\nreq.wait()  {CULPRIT}"
    elif form == "group":
        body = f"{s.data}\ngroup = {s.dist}.new_group()\nwork = {s.dist}.reduce_scatter_tensor(x, x, group=group, async_op=True)\nif work is not None:\n    work.wait()  {CULPRIT}"
    else:
        body = f"{s.data}\ny = {s.torch}.empty_like(x)\nwork = {s.dist}.all_to_all_single(y, x, async_op=True)\nwork.wait()  {CULPRIT}\nreturn y"
    return Fault("wide_dependency", form, body, "", imports)


def invention(rng: random.Random, s: Style) -> Fault:
    form = rng.choice(
        [
            "to_device",
            "from_device",
            "stream_method",
            "event_method",
            "keyword",
            "sync_stream",
            "non_blocking",
            "create",
        ]
    )
    line = {
        "to_device": f"{s.cuda}.async_copy_to_device(x, 0)", "from_device": f"h = {s.cuda}.async_copy_from_device(x, 'cpu')",
        "stream_method": f"{s.side}.wait(other)", "event_method": "done.wait_stream(other)",
        "keyword": f"y = {s.torch}.matmul(x, x, stream={s.side})", "sync_stream": f"{s.cuda}.synchronize({s.side})",
        "non_blocking": f"third = {s.cuda}.Stream(non_blocking=True)", "create": f"third = {s.cuda}.create_stream()",
    }[form]  # fmt: skip
    body = (
        f"{s.data}\n{s.side} = {s.cuda}.Stream()\nother = {s.cuda}.Stream()\ndone = {s.cuda}.Event()\n{line}  {CULPRIT}"
    )
    return Fault("no_such_call", form, body)


KINDS = (
    timed,
    timed,
    backward,
    waits,
    waits,
    waits,
    host,
    explicit,
    pageable,
    pinned,
    emptied,
    alias,
    environment,
    collective,
    invention,
)
