"""A tensor crosses streams with no wait between, so the overlap is a race.

Streams run independently: what one has launched is not done when the other starts.

**Found.**

- `s.wait_stream(torch.cuda.current_stream())` inside `with torch.cuda.stream(s)`: the current stream is `s` there, so
  it waits for itself
- a tensor made outside a stream context and used inside it, where the stream has not waited
- a tensor made on a side stream and used outside of it with no wait, or on another side stream
- gradients made outside and given to `backward(gradient=...)` inside, which PyTorch's notes name as unsafe
- a tensor of the surrounding stream whose last name goes (`del`, assigned anew, end of the function) while a side
  stream may still use it, with no `record_stream` and no wait back: the allocator hands its memory out again (*likely*)

Waits through streams, events, other streams in between and the host all count, in this file's functions too.

**Not found.** Tensors that come from elsewhere (parameters, attributes): their maker may have waited. A wait in one
branch counts as a wait; a wait of one stream out of a list counts for all of it. Functions that call `capture_begin`,
whose work only runs when the graph is launched. Streams by a computed index, from
functions that give what they gave before (`functools.cache`), and of other accelerators than CUDA's.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweave.source.facts import Crossing, Facts, FreedEarly, SelfWait, UnwaitedGradient
from torchweave.source.rules import Found, certainty, on


def find(facts: Facts) -> Iterator[Found]:
    """Yield a finding for each crossing without a wait."""
    yield from map(_self_wait, facts.of(SelfWait))
    yield from map(_crossing, facts.of(Crossing))
    yield from map(_gradient, facts.of(UnwaitedGradient))
    yield from map(_freed, facts.of(FreedEarly))


def _code(stream: str) -> str:
    return stream or "torch.cuda.current_stream()"


def _self_wait(fact: SelfWait) -> Found:
    side = fact.stream or "side"
    why = (
        f"Inside the context the current stream is `{side}` itself, so it waits for itself, and for nothing that was "
        "launched outside."
    )
    mend = (
        "outer = torch.cuda.current_stream()    # before the context\n"
        f"with torch.cuda.stream({side}):\n"
        f"    {side}.wait_stream(outer)\n"
    )
    return Found(fact.place.node, why, mend)


def _crossing(fact: Crossing) -> Found:
    name = f"`{fact.tensor}`" if fact.tensor else "A tensor"
    why = (
        f"{name} is made on {on(fact.made_on)} on line {fact.made} and used on {on(fact.used_on)} with no wait "
        "between, so it may be read before it is written."
    )
    mend = f"{_code(fact.used_on)}.wait_stream({_code(fact.made_on)})    # before this use"
    if not fact.made_on:
        mend += ", outside the context"
    return Found(fact.place.node, why, mend + "\n", certainty(fact.sure))


def _gradient(fact: UnwaitedGradient) -> Found:
    why = (
        f"`{fact.gradient}` is made outside and given to backward on {on(fact.stream)}, which has not waited for it, "
        "so backward may read it before it is written."
    )
    mend = (
        f"{_code(fact.stream)}.wait_stream(torch.cuda.current_stream())    # before entering the context\n"
        f"with torch.cuda.stream({_code(fact.stream)}):\n"
        "    loss.backward(gradient)\n"
    )
    return Found(fact.place.node, why, mend, certainty(fact.sure))


def _freed(fact: FreedEarly) -> Found:
    name = fact.tensor or "the tensor"
    why = (
        f"`{name}` is used here on {on(fact.used_on)} and its last name goes on line {fact.freed} with no wait back, "
        f"so the allocator may give its memory to new work on {on(fact.made_on)} while it is still read."
    )
    mend = f"{fact.tensor or 'x'}.record_stream({_code(fact.used_on)})    # after this use\n"
    return Found(fact.place.node, why, mend, "likely")
