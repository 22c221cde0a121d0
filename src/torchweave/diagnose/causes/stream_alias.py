"""Two stream objects are one CUDA stream.

PyTorch hands out streams from a pool of 32 for each priority, round robin: the 33rd is the first again. On ROCm
fewer hardware queues serve all streams.

**Evidence needed.** A live run that compares `cuda_stream` of the two objects. A trace shows only that fewer
streams worked than the program made.

**Mend.** Make streams once and keep them.

**Not proof of it.** One busy stream: the program may have made only one.

**Source.** PyTorch, `c10/cuda/CUDAStream.cpp` (kStreamsPerPool).
"""

from __future__ import annotations

from torchweave.diagnose.causes import Facts

RECOVERABLE = True
SEEN_IN = "live run or the source"
MEND = """\
SIDE = torch.cuda.Stream()   # once; not in the loop
assert SIDE.cuda_stream != other.cuda_stream
"""


def evidence(_: Facts) -> str:
    """Say why, in numbers of this trace."""
    return "Two stream objects have the same CUDA stream."
