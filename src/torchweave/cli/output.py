"""Printing of reports: styled on a terminal, plain elsewhere or where NO_COLOR is set."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from torchweave.cli.terminal import can_print
from torchweave.diagnose.ranks import Found
from torchweave.reporting.lines import Line, plain, wrapped
from torchweave.reporting.record import to_json
from torchweave.reporting.strip import ASCII_LEVELS, LEVELS
from torchweave.reporting.table import table
from torchweave.reporting.text import report
from torchweave.trace.recording import as_trace

_NARROWEST, _WIDEST = 40, 160


def show(found: Found, *, as_json: bool, as_list: bool) -> None:
    """Print diagnoses.

    Args:
        found: The diagnoses, and what differs between ranks.
        as_json: JSON instead of text.
        as_list: A list even if there is one diagnosis.
    """
    if as_json:
        sys.stdout.write(to_json(found.diagnoses, as_list=as_list, differences=found.differences))
        return
    columns = width()
    levels = LEVELS if can_print(LEVELS) else ASCII_LEVELS
    lines: list[Line] = []
    for diagnosis in found.diagnoses:
        lines += [*report(diagnosis, columns, levels=levels), Line("")]
    if as_list and len(found.diagnoses) > 1:
        lines += table(found.diagnoses)
    lines += [Line(""), Line("Between the ranks", "bold")] if found.differences else []
    for text in found.differences:
        lines += wrapped(text, columns, "  ")
    print_lines(lines)


def width() -> int:
    """Return how many columns a report may take."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, _NARROWEST), _WIDEST)


def write(found: Found, source: Path, *, html: Path | None, perfetto: Path | None) -> None:
    """Write the reports that go to files, and say so on standard error.

    Args:
        found: The diagnoses, and what differs between ranks.
        source: The first trace.
        html: Where the HTML page goes, None for nowhere.
        perfetto: Where the trace for Perfetto goes, None for nowhere.
    """
    if html is not None:
        from torchweave.reporting.html import write_html

        write_html(found.diagnoses, html, differences=found.differences)
    if perfetto is not None:
        from torchweave.reporting.perfetto import write_perfetto

        with as_trace(source) as trace:
            write_perfetto(found.diagnoses[0], trace, perfetto)
    for path in (html, perfetto):
        if path is not None:
            print(f"torchweave: wrote {path}", file=sys.stderr)


def print_lines(lines: list[Line]) -> None:
    """Print lines, with their styles where that is wanted."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        encoding = sys.stdout.encoding or "ascii"
        # names in a trace can hold anything, and a report must not fail on them
        sys.stdout.write(plain(lines).encode(encoding, "replace").decode(encoding))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        # Text, not markup: brackets in a kernel's name are no style
        console.print(Text(line.text.encode("utf-8", "replace").decode(), style=line.style))
