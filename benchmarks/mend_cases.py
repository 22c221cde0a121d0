"""Scripts that lose their overlap for one known reason each, and the same scripts with the report's mend applied.

A script is a `Variant`: `setup` makes its state, `prepare` (if any) runs before each recording, `body` is recorded.
Its sizes are chosen for an H200: a scan along 16 rows holds 16 blocks, so two of them fit beside each other with room
to spare, and whatever keeps them apart is the script's own doing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import Stream
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset

State = dict[str, Any]
Step = Callable[[State], object]

# the two parts of a script that has one stream only, as `--between` would name them
PARTS = ("range:first part", "range:second part")


@dataclass(frozen=True)
class Variant:
    """One form of a script.

    Attributes:
        setup: Makes the state that the other two work on.
        body: What is recorded.
        prepare: Runs before every call of the body, and is not recorded.
        num_warm: How often the body runs before it is recorded.
        own_process: It needs a process in which nothing has run before.
        env: Environment variables of that process.
    """

    setup: Callable[[], State]
    body: Step
    prepare: Step | None = None
    num_warm: int = 2
    own_process: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A cause, a script that has it, and the script mended.

    Attributes:
        name: Name of the case: the cause's, and what is special about the script.
        cause: The cause whose mend is applied.
        script: The corpus script that this one follows.
        mend: What was changed, in one line.
        before: The script.
        after: The script, mended.
        between: The sides; None leaves the choice to the report.
        remark: What to know about a mend that is not about overlap.
    """

    name: str
    cause: str
    script: str
    mend: str
    before: Variant
    after: Variant
    between: tuple[str, str] | None = None
    remark: str = ""


# ------------------------------------------------------------------------------------------------- building blocks
def rows(num_columns: int = 1_500_000) -> Tensor:
    return torch.rand(16, num_columns, device="cuda")


def square(size: int) -> Tensor:
    return torch.randn(size, size, device="cuda") / size**0.5


def scan(x: Tensor, times: int = 1) -> Tensor:
    """Run long kernels of 16 blocks."""
    y = x
    for _ in range(times):
        y = torch.cumsum(x, 1)
    return y


def products(x: Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(x, x)


def fork(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())


def join(streams: Iterable[Stream]) -> None:
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


def two_streams() -> tuple[Stream, Stream]:
    return Stream(), Stream()


def long_scans() -> State:
    return {"a": rows(), "b": rows(), "streams": two_streams()}


def short_scans() -> State:
    return {"a": rows(60_000), "b": rows(60_000), "streams": two_streams()}


def by_turns(st: State, rounds: int, first: Step, second: Step) -> None:
    """Launch portions of two sides alternately, each side on its own stream."""
    s1, s2 = st["streams"]
    fork((s1, s2))
    for _ in range(rounds):
        with torch.cuda.stream(s1):
            first(st)
        with torch.cuda.stream(s2):
            second(st)
    join((s1, s2))


def scans_by_turns(st: State) -> None:
    by_turns(st, 40, lambda st: scan(st["a"]), lambda st: scan(st["b"]))


class ScanChunk(nn.Module):
    """A model chunk whose forward and backward are long kernels of 16 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.cumsum(x * self.weight, 1) * 1e-6
        return x


# ------------------------------------------------------------------------------------------- one stream for both
def one_stream(st: State) -> None:
    with record_function("first part"):
        scan(st["a"], 40)
    with record_function("second part"):
        scan(st["b"], 40)


def side_stream(st: State) -> None:
    side = st["streams"][0]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), record_function("second part"):
        scan(st["b"], 40)
    with record_function("first part"):
        scan(st["a"], 40)
    torch.cuda.current_stream().wait_stream(side)


def named_scans_by_turns(st: State) -> None:
    s1, s2 = st["streams"]
    fork((s1, s2))
    for _ in range(40):
        with torch.cuda.stream(s1), record_function("first part"):
            scan(st["a"])
        with torch.cuda.stream(s2), record_function("second part"):
            scan(st["b"])
    join((s1, s2))


def aliased() -> State:
    pool = [Stream() for _ in range(33)]
    return long_scans() | {"streams": (pool[0], pool[32])}


def made_once() -> State:
    st = long_scans()
    s1, s2 = st["streams"]
    if s1.cuda_stream == s2.cuda_stream:
        raise RuntimeError("two streams made one after the other are one CUDA stream")
    return st


# ------------------------------------------------------------------------------------------------------- backward
def chunks(make: Callable[[], nn.Module], *shape: int) -> State:
    x = torch.rand(*shape, device="cuda", requires_grad=True)
    return {"f": make(), "g": make(), "x": x, "streams": two_streams()}


def dense_chunks() -> State:
    def make() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU()))).cuda()

    return chunks(make, 2048, 2048)


def scan_chunks() -> State:
    return chunks(ScanChunk, 16, 800_000)


def loss_here(st: State) -> None:
    st["loss"] = st["g"](st["x"]).square().mean()


def loss_on_side(st: State) -> None:
    side = st["streams"][0]
    fork((side,))
    with torch.cuda.stream(side):
        loss_here(st)
    join((side,))


def backward_beside_forward(st: State) -> None:
    """Call backward under the side stream, and the other chunk's forward on the current one."""
    side = st["streams"][0]
    fork((side,))
    with torch.cuda.stream(side):
        st["loss"].backward()
    st["f"](st["x"])
    join((side,))


def backward_before_forward(st: State) -> None:
    """Call backward under the stream of the next forward."""
    fork(st["streams"])
    with torch.cuda.stream(st["streams"][1]):
        st["loss"].backward()
        st["f"](st["x"])
    join(st["streams"])


def backward_under_own_stream(st: State) -> None:
    fork(st["streams"])
    with torch.cuda.stream(st["streams"][0]):
        st["loss"].backward()
    with torch.cuda.stream(st["streams"][1]):
        st["f"](st["x"])
    join(st["streams"])


# ------------------------------------------------------------------------------------------------- issued too late
def tiny_adds() -> State:
    return {"a": torch.zeros(256, device="cuda"), "b": torch.zeros(256, device="cuda"), "streams": two_streams()}


def add_by_turns(st: State) -> None:
    by_turns(st, 300, lambda st: st["a"].add_(1), lambda st: st["b"].add_(1))


def small_products() -> State:
    return {"a": square(256), "b": square(256), "streams": two_streams()}


def all_products(st: State) -> None:
    by_turns(st, 1, lambda st: products(st["a"], 500), lambda st: products(st["b"], 500))


def products_by_turns(st: State) -> None:
    by_turns(st, 50, lambda st: products(st["a"], 10), lambda st: products(st["b"], 10))


def all_scans(st: State) -> None:
    by_turns(st, 1, lambda st: scan(st["a"], 400), lambda st: scan(st["b"], 400))


def portions_of_scans(st: State) -> None:
    by_turns(st, 40, lambda st: scan(st["a"], 10), lambda st: scan(st["b"], 10))


def captured(setup: Callable[[], State], step: Step) -> Callable[[], State]:
    """Return a setup that captures a step in a CUDA graph, both streams forked and joined inside."""

    def make() -> State:
        st = setup()
        step(st)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(st)
        return st | {"graph": graph}

    return make


def replay(st: State) -> None:
    st["graph"].replay()


def products_and_scans() -> State:
    return {"a": square(1024), "b": rows(), "streams": two_streams()}


def queue_filled(st: State) -> None:
    by_turns(st, 1, lambda st: products(st["a"], 2600), lambda st: scan(st["b"], 55))


def queue_shared(st: State) -> None:
    by_turns(st, 55, lambda st: products(st["a"], 47), lambda st: scan(st["b"]))


# --------------------------------------------------------------------------------------------------- the host waits
def item_each_step(st: State) -> None:
    by_turns(st, 12, lambda st: scan(st["a"], 4).sum().item(), lambda st: scan(st["b"], 4).sum().item())


def with_totals() -> State:
    totals = torch.zeros(2, device="cuda")
    return long_scans() | {"totals": totals, "host": torch.empty(2, pin_memory=True)}


def item_at_the_end(st: State) -> None:
    total_a, total_b = st["totals"]
    by_turns(
        st,
        12,
        lambda st: total_a.add_(scan(st["a"], 4).sum().detach()),
        lambda st: total_b.add_(scan(st["b"], 4).sum().detach()),
    )
    st["host"].copy_(st["totals"], non_blocking=True)


def synchronize_each_step(st: State) -> None:
    def step(x: Tensor) -> None:
        scan(x, 8)

    s1, s2 = st["streams"]
    fork((s1, s2))
    for _ in range(10):
        with torch.cuda.stream(s1):
            step(st["a"])
        torch.cuda.synchronize()
        with torch.cuda.stream(s2):
            step(st["b"])
        torch.cuda.synchronize()
    join((s1, s2))


def no_synchronize(st: State) -> None:
    by_turns(st, 10, lambda st: scan(st["a"], 8), lambda st: scan(st["b"], 8))


def download_each_step(st: State) -> None:
    by_turns(st, 6, lambda st: scan(st["a"], 2)[:, :1000].cpu(), lambda st: scan(st["b"], 2)[:, :1000].to("cpu"))


def with_host_buffers() -> State:
    st = long_scans()
    hosts = [torch.empty_like(st["a"][:, :1000], device="cpu", pin_memory=True) for _ in range(2)]
    return st | {"hosts": hosts, "done": [torch.cuda.Event(), torch.cuda.Event()]}


def download_behind(st: State) -> None:
    def download(part: str, row: int) -> None:
        st["hosts"][row].copy_(scan(st[part], 2)[:, :1000], non_blocking=True)
        st["done"][row].record()

    by_turns(st, 6, lambda _: download("a", 0), lambda _: download("b", 1))
    for done in st["done"]:
        done.synchronize()


def upload(*, pinned: bool) -> Callable[[], State]:
    def make() -> State:
        host = torch.empty(4096, 4096, pin_memory=pinned).normal_()
        return {"a": square(2048), "host": host, "streams": two_streams()}

    return make


def upload_each_step(st: State) -> None:
    def copy(st: State) -> None:
        st["device"] = st["host"].to("cuda", non_blocking=True)

    by_turns(st, 6, copy, lambda st: torch.mm(st["a"], st["a"]))


def pin_each_step(st: State) -> None:
    _pinned_uploads(st, lambda num_rows: torch.empty(num_rows, 4096, pin_memory=True))


def pin_once() -> State:
    return long_scans() | {"hold": [], "host": torch.empty(512 * 9, 4096, pin_memory=True)}


def pinned_before(st: State) -> None:
    _pinned_uploads(st, lambda num_rows: st["host"][:num_rows])


def _pinned_uploads(st: State, get: Callable[[int], Tensor]) -> None:
    s1, s2 = st["streams"]
    fork((s1, s2))
    for step in range(5):
        with torch.cuda.stream(s1):
            scan(st["a"], 4)
        host = get(512 * (step + 5))
        st["hold"].append(host)
        with torch.cuda.stream(s2):
            host[:64].to("cuda", non_blocking=True)
    join((s1, s2))


def prepare_batch() -> None:
    """Keep a processor busy for 4 ms, as reading and augmenting do."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.004:
        sum(range(2000))


def batches_in_the_loop(st: State) -> None:
    def step(x: Tensor) -> None:
        scan(x, 8)
        prepare_batch()

    by_turns(st, 6, lambda st: step(st["a"]), lambda st: step(st["b"]))


class Batches(Dataset[Tensor]):
    """The two batches of each of six steps."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Tensor:
        if row >= len(self):
            raise IndexError(row)
        prepare_batch()
        prepare_batch()
        return torch.full((2,), float(row))


def start_loader(st: State) -> None:
    loader: DataLoader[Tensor] = DataLoader(Batches(), batch_size=None, num_workers=4, pin_memory=True, timeout=20)
    st["batches"] = iter(loader)
    time.sleep(0.3)  # the steps before this one would have given the workers that time


def batches_beside_the_loop(st: State) -> None:
    batches: Iterator[Tensor] = st["batches"]
    s1, s2 = st["streams"]
    fork((s1, s2))
    for _ in batches:
        with torch.cuda.stream(s1):
            scan(st["a"], 8)
        with torch.cuda.stream(s2):
            scan(st["b"], 8)
    join((s1, s2))


# ------------------------------------------------------------------------------------------------- first uses
def first_allocations(st: State) -> None:
    s1, s2 = st["streams"]
    a, b = st["a"], st["b"]
    fork((s1, s2))
    # all results are kept to the end, so each needs memory of its own
    with torch.cuda.stream(s1):
        kept = [torch.mm(a, a), torch.randn(16384, 8192, device="cuda")]
    with torch.cuda.stream(s2):
        kept += [torch.mm(b, b), torch.randn(16384, 8192, device="cuda")]
        kept += [torch.mm(b, kept[2])]
    join((s1, s2))


def two_products() -> State:
    return {"a": square(1024), "b": square(1024), "streams": two_streams()}


def first_kernels(st: State) -> None:
    by_turns(
        st,
        1,
        lambda st: scan(st["a"], 12).softmax(-1).cumsum(0).erf(),
        lambda st: scan(st["b"], 12).sort(-1).values.logsumexp(0),
    )


# ---------------------------------------------------------------------------------------------- ordered on the device
def wait_for_everything(st: State) -> None:
    s1, s2 = st["streams"]
    fork((s1, s2))
    for _ in range(8):
        with torch.cuda.stream(s1):
            scan(st["a"], 12)
        s2.wait_stream(s1)
        with torch.cuda.stream(s2):
            scan(st["b"], 12)
        s1.wait_stream(s2)
    join((s1, s2))


def wait_for_what_is_needed(st: State) -> None:
    """Let the last scan of each block need the first one of the other side's block before it."""
    s1, s2 = st["streams"]
    fork((s1, s2))
    b_ready = s2.record_event()
    for _ in range(8):
        with torch.cuda.stream(s1):
            scan(st["a"])
            a_ready = s1.record_event()
            scan(st["a"], 10)
            b_ready.wait()
            scan(st["a"])
        with torch.cuda.stream(s2):
            scan(st["b"])
            b_ready = s2.record_event()
            scan(st["b"], 10)
            a_ready.wait()
            scan(st["b"])
    join((s1, s2))


def blocking_stream() -> State:
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    handle = ctypes.c_void_p()
    if runtime.cudaStreamCreate(ctypes.byref(handle)) != 0:
        raise RuntimeError("cudaStreamCreate failed")
    return long_scans() | {"streams": (torch.cuda.ExternalStream(handle.value),)}


def beside_the_default_stream(st: State) -> None:
    for _ in range(30):
        scan(st["a"])
        with torch.cuda.stream(st["streams"][0]):
            scan(st["b"])


def four_scans() -> State:
    return {"parts": [rows() for _ in range(4)], "streams": [Stream() for _ in range(4)]}


def four_streams(st: State) -> None:
    fork(st["streams"])
    for part, stream in zip(st["parts"], st["streams"], strict=True):
        with torch.cuda.stream(stream):
            scan(part, 12)
    join(st["streams"])


def wait_on_itself(st: State) -> None:
    x, side = scan(st["a"], 12), st["streams"][0]
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())
        scan(x, 12)
    join((side,))


def wait_on_the_outer(st: State) -> None:
    x, side = scan(st["a"], 12), st["streams"][0]
    outer = torch.cuda.current_stream()
    with torch.cuda.stream(side):
        side.wait_stream(outer)
        scan(x, 12)
    join((side,))


# ------------------------------------------------------------------------------------------------------- the cases
def _case(name: str, script: str, mend: str, before: Variant, after: Variant, **more: Any) -> Case:
    return Case(name, name.partition("/")[0], script, mend, before, after, **more)


CASES: tuple[Case, ...] = (
    # first what loads the scan's kernel, then what needs that no pinned memory is cached yet
    _case(
        "same_stream",
        "two_blocks_no_stream",
        "the second part on a side stream, which waits only for what was there before the first part",
        Variant(long_scans, one_stream),
        Variant(long_scans, side_stream),
        between=PARTS,
    ),
    _case(
        "pinned_alloc",
        "pin_in_loop",
        "one pinned buffer of the largest shape, made once, and views of it in the loop",
        Variant(lambda: long_scans() | {"hold": []}, pin_each_step, num_warm=0),
        Variant(pin_once, pinned_before),
    ),
    _case(
        "pageable_copy",
        "pageable_upload",
        "the host tensor is pinned once, before the loop",
        Variant(upload(pinned=False), upload_each_step),
        Variant(upload(pinned=True), upload_each_step),
    ),
    _case(
        "stream_alias",
        "stream_pool_alias",
        "two streams made once and kept, compared by their cuda_stream",
        Variant(aliased, named_scans_by_turns),
        Variant(made_once, named_scans_by_turns),
        between=PARTS,
    ),
    _case(
        "backward_on_forward_stream",
        "seed_overlapped_forward_backward",
        "the forward of the chunk whose backward shall overlap runs on the side stream as well",
        Variant(dense_chunks, backward_beside_forward, prepare=loss_here),
        Variant(dense_chunks, backward_beside_forward, prepare=loss_on_side),
    ),
    _case(
        "backward_on_forward_stream/room",
        "seed_overlapped_forward_backward, with chunks that leave room on the chip",
        "the forward of the chunk whose backward shall overlap runs on the side stream as well",
        Variant(scan_chunks, backward_beside_forward, prepare=loss_here),
        Variant(scan_chunks, backward_beside_forward, prepare=loss_on_side),
    ),
    _case(
        "backward_join",
        "forward_after_backward_join",
        "backward under its own microbatch's stream, the next forward under its own",
        Variant(scan_chunks, backward_before_forward, prepare=loss_on_side),
        Variant(scan_chunks, backward_under_own_stream, prepare=loss_on_side),
    ),
    _case(
        "issued_late",
        "all_of_a_then_all_of_b",
        "portions of ten products of each side, by turns",
        Variant(small_products, all_products),
        Variant(small_products, products_by_turns),
    ),
    _case(
        "issued_late/ahead",
        "all_of_a_then_all_of_b, with kernels that are longer than their launches",
        "portions of ten scans of each side, by turns",
        Variant(short_scans, all_scans),
        Variant(short_scans, portions_of_scans),
    ),
    _case(
        "launch_queue_full",
        "queue_full",
        "55 portions of 47 products and one scan, by turns",
        Variant(products_and_scans, queue_filled),
        Variant(products_and_scans, queue_shared),
    ),
    _case(
        "host_sync",
        "item_each_step",
        "sums stay on the device and are copied to pinned memory once, at the end",
        Variant(long_scans, item_each_step),
        Variant(with_totals, item_at_the_end),
    ),
    _case(
        "explicit_sync",
        "device_synchronize_in_loop",
        "no synchronize in the loop: neither the host nor the other stream needs a result",
        Variant(long_scans, synchronize_each_step),
        Variant(long_scans, no_synchronize),
    ),
    _case(
        "blocking_copy",
        "download_each_step",
        "copies to pinned buffers made once, non_blocking, and the events awaited after the loop",
        Variant(long_scans, download_each_step),
        Variant(with_host_buffers, download_behind),
    ),
    _case(
        "host_busy",
        "host_busy_starves",
        "batches are prepared by four DataLoader workers beside the loop",
        Variant(short_scans, batches_in_the_loop),
        Variant(short_scans, batches_beside_the_loop, prepare=start_loader),
    ),
    _case(
        "wide_dependency",
        "wide_wait",
        "an event right after the scan that is needed, awaited right before the scan that needs it",
        Variant(long_scans, wait_for_everything),
        Variant(long_scans, wait_for_what_is_needed),
    ),
    _case(
        "legacy_default_stream",
        "legacy_default_stream",
        "torch.cuda.Stream(), which is non-blocking, in place of a stream by cudaStreamCreate",
        Variant(blocking_stream, beside_the_default_stream),
        Variant(long_scans, beside_the_default_stream),
    ),
    _case(
        "missing_wait",
        "wait_on_itself",
        "the outer stream is taken before the context is entered",
        Variant(long_scans, wait_on_itself),
        Variant(long_scans, wait_on_the_outer),
        remark="The overlap before was a race. The mend restores the order that the data flow needs, so there is "
        "nothing left to overlap.",
    ),
    _case(
        "launch_bound",
        "tiny_kernels",
        "both streams captured in one CUDA graph, forked and joined inside, and replayed",
        Variant(tiny_adds, add_by_turns),
        Variant(captured(tiny_adds, add_by_turns), replay),
    ),
    _case(
        "launch_bound/products",
        "all_of_a_then_all_of_b",
        "both streams captured in one CUDA graph, forked and joined inside, and replayed",
        Variant(small_products, all_products),
        Variant(captured(small_products, all_products), replay),
    ),
    _case(
        "device_alloc",
        "first_alloc_on_stream",
        "the step runs once on its streams, with its shapes, before it matters",
        Variant(two_products, first_allocations, num_warm=0, own_process=True),
        Variant(two_products, first_allocations, num_warm=1, own_process=True),
    ),
    _case(
        "lazy_load",
        "lazy_loading",
        "the step runs once, with its shapes, before it matters",
        Variant(long_scans, first_kernels, num_warm=0, own_process=True),
        Variant(long_scans, first_kernels, num_warm=1, own_process=True),
    ),
    _case(
        "launch_blocking",
        "launch_blocking",
        "CUDA_LAUNCH_BLOCKING unset",
        Variant(long_scans, scans_by_turns, own_process=True, env={"CUDA_LAUNCH_BLOCKING": "1"}),
        Variant(long_scans, scans_by_turns, own_process=True),
    ),
    _case(
        "max_connections",
        "one_connection",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
        Variant(four_scans, four_streams, own_process=True, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        Variant(four_scans, four_streams, own_process=True, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    ),
)
