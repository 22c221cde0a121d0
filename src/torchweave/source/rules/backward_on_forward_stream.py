"""Backward is called under a stream that its forward did not run on.

Autograd runs each backward operation on the stream of its forward operation. `with torch.cuda.stream(side):
loss.backward()` moves only the first gradient to `side`; the rest runs where the forward ran.

**Found.** `backward()`, `torch.autograd.backward` or `torch.autograd.grad` (and `run_backward`,
`accelerator.backward`) inside a context of a side stream: *shown* where the file shows that the forward ran on
another stream, *likely* where the loss comes from elsewhere and nothing in the file runs under that stream.

**Not found.** Where the forward ran under the same stream, as in a warm-up before CUDA graph capture.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchweave.source.facts import Backward, Facts
from torchweave.source.rules import Found, certainty, on

_MOST = 60


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each call of backward."""
    for call in facts.of(Backward):
        if call.forward is None and call.stream in facts.launched_on:
            continue
        where = f"on {on(call.forward)}" if call.forward is not None else "on the stream of its forward"
        why = (
            f"Each backward operation runs on the stream of its forward operation, so `{call.call}` under "
            f"{on(call.stream)} runs {where} all the same, and overlaps nothing there."
        )
        yield Found(call.place.node, why, _mend(call), certainty(call.forward is not None))


def _mend(call: Backward) -> str:
    node = call.place.node
    short = node.lineno == node.end_lineno and (node.end_col_offset or _MOST) - node.col_offset < _MOST
    backward = ast.unparse(node) if short else f"{call.loss}.backward()"
    return (
        f"out = torchweave.weave(forward=lambda: chunk(x), backward=lambda: {backward})\n"
        "# or run the forward of this loss under the stream that its backward shall run on:\n"
        f"with torch.cuda.stream({call.stream or 'side'}):\n"
        f"    {call.loss} = chunk1(x1)\n"
    )
