"""`cudaMalloc` or `cudaFree` in the loop.

The first use of a stream, `empty_cache()` and memory pressure make the caching allocator ask the driver, which
holds the host and can wait for the whole device.

**Evidence needed.** Allocating or freeing calls of the driver between two launches.

**Mend.** Warm every stream up with its real shapes; keep the peak below the limit.

**Not proof of it.** Allocations in the first steps only.

**Source.** PyTorch notes, "CUDA semantics, memory management"; CUDA runtime documentation, `cudaFree`.
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "trace"
MEND = """\
for stream in (s1, s2):              # once, with real shapes
    with torch.cuda.stream(stream): step()
# under memory pressure: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and no empty_cache() in the loop
"""


def evidence(facts: Facts) -> str:
    """Say why, in numbers of this trace."""
    return f"{facts.moments}: {facts.call} held the host, {facts.median} each at the median."
