"""IDEA: when each strand computed, and when it waited, as recorded times: what overlap is judged by."""

from __future__ import annotations

import time
from typing import NamedTuple


class Span(NamedTuple):
    """A time that a strand spent computing or waiting.

    Attributes:
        strand: `forward` or `backward`.
        kind: `compute` (it ran), `away` (the other strand's turn), or `wait` (for its own communication).
        begin_ns: Host clock, ns.
        end_ns: Host clock, ns.
    """

    strand: str
    kind: str
    begin_ns: int
    end_ns: int


class Log:
    """Collects the spans of every pair that runs while it is observed. Appending is safe from both strands."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._since: dict[str, int] = {}

    def begin(self, strand: str) -> None:
        """Note that a strand starts to run."""
        self._since[strand] = time.perf_counter_ns()

    def leave(self, strand: str, now_ns: int) -> None:
        """Note that a strand reached a crossing."""
        if strand in self._since:
            self.spans.append(Span(strand, "compute", self._since.pop(strand), now_ns))
        self._since[strand + " away"] = now_ns

    def enter(self, strand: str, wait_begun_ns: int, now_ns: int) -> None:
        """Note that a strand goes on after a crossing."""
        left = self._since.pop(strand + " away", wait_begun_ns)
        self.spans.append(Span(strand, "away", left, wait_begun_ns))
        self.spans.append(Span(strand, "wait", wait_begun_ns, now_ns))
        self._since[strand] = now_ns

    def end(self, strand: str) -> None:
        """Note that a strand has ended."""
        if strand in self._since:
            self.spans.append(Span(strand, "compute", self._since.pop(strand), time.perf_counter_ns()))

    def computing(self) -> list[tuple[int, int]]:
        """Return begin and end of every span in which a strand computed, ns."""
        return [(span.begin_ns, span.end_ns) for span in self.spans if span.kind == "compute"]
