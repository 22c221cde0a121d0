"""Watches every script of tests/gpu/scripts live, and writes a table: is the first cause right, and its line?

One command, on a machine with CUDA:

    python benchmarks/watch_scripts.py --out RESULTS.json        (and RESULTS.md beside it)

`--part 1/2` runs a part of them, `--only NAME ...` some. Every script has a time limit, and so has the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "tests" / "gpu" / "scripts"
MARK = "# culprit"
# what watching may cost where the host is not what the steps wait for
MOST_FACTOR = 1.15


@dataclass(frozen=True)
class Script:
    """A script and the truth about it, from the comments at its head.

    Attributes:
        name: Its file's name.
        cause: The first cause that is right.
        accept: Others that are.
        options: Of `torchweave why`.
        env: The environment that it needs.
        after: The public report whose pattern it has.
        factor: Why the cost of watching cannot be told from its steps, empty where it can.
        lines: The lines with the mark.
    """

    name: str
    cause: str
    accept: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    after: str = ""
    factor: str = ""
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """What watching a script gave.

    Attributes:
        name: The script.
        expected: The first cause that is right, and others that are.
        found: The first cause in the report; `none` where it overlapped, or nothing could.
        verdict: The report's.
        line: Where the report says that it is.
        marked: The marked lines.
        factor: How many times as long a watched step is, None where that was not measured.
        right: Whether cause and line are right.
        seconds: How long all of it took.
        error: What went wrong, empty for nothing.
    """

    name: str
    expected: tuple[str, ...]
    found: str
    verdict: str
    line: int | None
    marked: tuple[int, ...]
    factor: float | None
    right: bool
    seconds: float
    error: str = ""


def read_script(path: Path) -> Script:
    """Return a script's truth."""
    head: dict[str, str] = {}
    text = path.read_text(encoding="utf-8").splitlines()
    for line in text:
        key, colon, value = line.removeprefix("# ").partition(": ")
        if line.startswith("# ") and colon and key in Script.__dataclass_fields__:
            head[key] = value.strip()
    return Script(
        name=path.stem,
        cause=head["cause"],
        accept=tuple(word.strip() for word in head.get("accept", "").split(",") if word.strip()),
        options=tuple(shlex.split(head.get("options", ""))),
        env=tuple(head.get("env", "").split()),
        after=head.get("after", ""),
        factor=head.get("factor", ""),
        lines=tuple(row for row, line in enumerate(text, 1) if line.rstrip().endswith(MARK)),
    )


def all_scripts() -> list[Script]:
    """Return all scripts, by name."""
    return [read_script(path) for path in sorted(SCRIPTS.glob("*.py"))]


def watch(script: Script, limit_s: float) -> Row:
    """Watch one script in a process of its own."""
    begin = time.monotonic()
    words = [sys.executable, "-m", "torchweave", "why", *script.options, "--json", str(SCRIPTS / f"{script.name}.py")]
    environment = {**os.environ, **dict(pair.split("=", 1) for pair in script.env)}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False, env=environment)
        report = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return _failed(script, begin, f"it did not end within {limit_s:g} s")
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return _failed(script, begin, f"code {done.returncode}: {last}")
    return judge(script, report, time.monotonic() - begin)


def judge(script: Script, report: dict, seconds: float) -> Row:
    """Compare a report with the truth."""
    causes = report["causes"]
    found = causes[0]["cause"] if causes else "none"
    line = causes[0]["where"]["line"] if causes else None
    watched = report.get("watched")
    right = found in (script.cause, *script.accept) and (not script.lines or line in script.lines)
    return Row(
        name=script.name,
        expected=(script.cause, *script.accept),
        found=found,
        verdict=report["verdict"],
        line=line,
        marked=script.lines,
        factor=watched["factor"] if watched and not script.factor else None,
        right=right,
        seconds=seconds,
    )


def _failed(script: Script, begin: float, why: str) -> Row:
    expected, seconds = (script.cause, *script.accept), time.monotonic() - begin
    return Row(script.name, expected, "", "", None, script.lines, None, False, seconds, why)


def table(rows: list[Row], facts: dict[str, str]) -> str:
    """Return the results as Markdown."""
    right = sum(row.right for row in rows)
    factors = [row for row in rows if row.factor is not None and "launch_bound" not in (row.found, *row.expected)]
    dear = [row.name for row in factors if row.factor > MOST_FACTOR]
    lines = [
        "# Scripts with a known cause, watched live",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        f"- right (first cause, and its line among the marked ones): {right} of {len(rows)}",
        f"- watching costs more than {MOST_FACTOR:g} times in {len(dear)} of {len(factors)} that are not launch-bound"
        + (f": {', '.join(dear)}" if dear else ""),
        "",
        "| script | expected | found | verdict | line | marked | factor | right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        marked = ", ".join(map(str, row.marked)) or "-"
        cells = (
            row.name,
            " or ".join(row.expected),
            row.found or row.error,
            row.verdict,
            "-" if row.line is None else str(row.line),
            marked,
            "-" if row.factor is None else f"{row.factor:.2f}",
            "yes" if row.right else "NO",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Watch the scripts, write the results, and say how many are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; the table goes beside it, as .md")
    parser.add_argument("--only", nargs="+", default=[], help="names of scripts")
    parser.add_argument("--part", default="1/1", help="which part of how many, as 1/2")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of them")
    parser.add_argument("--each", type=float, default=90, help="seconds for one")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    scripts = [script for script in all_scripts() if not args.only or script.name in args.only][part - 1 :: parts]
    begin, rows = time.monotonic(), []
    for script in scripts:
        left = args.limit - (time.monotonic() - begin)
        row = watch(script, min(args.each, left)) if left > 1 else _failed(script, time.monotonic(), "no time was left")
        rows.append(row)
        where = f"line {row.line} of {row.marked}" if row.marked else ""
        print(
            f"{'ok' if row.right else 'NO':3} {row.name:36} {row.found or row.error} {where} {row.factor or ''}",
            flush=True,
        )
        facts = _facts()
        args.out.write_text(json.dumps({"facts": facts, "rows": [asdict(each) for each in rows]}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(rows, facts))
    print(f"{sum(row.right for row in rows)} of {len(rows)} right", flush=True)
    return 0 if all(row.right for row in rows) else 1


def _facts() -> dict[str, str]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/watch_scripts.py",
    }


if __name__ == "__main__":
    sys.exit(main())
