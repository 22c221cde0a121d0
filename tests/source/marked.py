"""Programs whose lines say what has to be found on them: `# -> cause`, and nothing anywhere else."""

from __future__ import annotations

import re
import textwrap

from torchweave.source import check_source

_MARK = re.compile(r"# -> ([a-z_, ]+)$")
HEAD = """\
import os
import time
import torch
import torch.distributed as dist
import torch.nn.functional as F
"""


def assert_found_where_marked(code: str, *, head: str = HEAD) -> None:
    """Check a program, and compare what is found, line by line, with its marks."""
    text = head + textwrap.dedent(code)
    wanted = {
        (line, cause.strip())
        for line, row in enumerate(text.splitlines(), 1)
        for cause in (_MARK.search(row)[1].split(",") if _MARK.search(row) else ())
    }
    found = {(one.line, one.cause) for one in check_source(text)}
    rows = text.splitlines()
    told = [f"{cause} on: {rows[line - 1].strip()}" for line, cause in sorted(found - wanted)]
    missed = [f"{cause} on: {rows[line - 1].strip()}" for line, cause in sorted(wanted - found)]
    assert (told, missed) == ([], []), f"wrongly told: {told}; missed: {missed}"
