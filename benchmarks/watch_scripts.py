"""Watches every script of tests/gpu/scripts live, and writes a table: is the first cause right, and its line?

One command, on a machine with CUDA:

    python benchmarks/watch_scripts.py --out RESULTS.json        (and RESULTS.md beside it)

`--part 1/2` runs a part of them, `--only NAME ...` some: with two devices, a part on each by `CUDA_VISIBLE_DEVICES`.
Every script runs in a process of its own and has a time limit, and so has the whole; results are written as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
        others: The next causes, each with its line.
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
    others: tuple[str, ...] = ()


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


# what takes longest before a script begins, done while the one before still runs; it waits for a word to begin
_PRELUDE = """\
import sys
import torch, torchweave.diagnose.ranks, torchweave.record.session, torchweave.reporting.record
from torchweave.cli.main import main
sys.stdin.readline()
sys.exit(main(sys.argv[1:]))
"""


def ready(script: Script, keep: Path | None = None) -> subprocess.Popen[str]:
    """Start a process that will watch a script, and waits.

    Args:
        script: The script.
        keep: A folder for its recording.
    """
    save = ["--save", str(keep / f"{script.name}.twr")] if keep is not None else []
    words = ["why", *script.options, *save, "--json", str(SCRIPTS / f"{script.name}.py")]
    environment = {**os.environ, **dict(pair.split("=", 1) for pair in script.env)}
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def watch(process: subprocess.Popen[str], script: Script, limit_s: float) -> Row:
    """Let a process that is ready watch its script, which may crash or hang."""
    begin = time.monotonic()
    try:
        out, err = process.communicate("go\n", timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        return _failed(script, begin, f"it did not end within {limit_s:g} s")
    try:
        return judge(script, json.loads(out), time.monotonic() - begin)
    except (ValueError, KeyError, TypeError, IndexError):
        last = next((line for line in reversed(err.strip().splitlines()) if not line.startswith("USDT")), "no word")
        return _failed(script, begin, f"code {process.returncode}, no report: {last}")


def end(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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
        others=tuple(f"{one['cause']}:{one['where']['line']}" for one in causes[1:4]),
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
    parser.add_argument("--each", type=float, default=60, help="seconds for one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings of what is wrong here")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    scripts = [script for script in all_scripts() if not args.only or script.name in args.only][part - 1 :: parts]
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in watch_all(scripts, args.limit, args.each, args.keep):
        rows.append(row)
        where = f"line {row.line} of {row.marked}" if row.marked else ""
        print(
            f"{'ok' if row.right else 'NO':3} {row.name:36} {row.found or row.error} {where} {row.factor or ''} "
            f"{row.seconds:.0f} s {'' if row.right else ' '.join(row.others)}",
            flush=True,
        )
        facts = _facts()
        args.out.write_text(json.dumps({"facts": facts, "rows": [asdict(each) for each in rows]}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(rows, facts))
    print(f"{sum(row.right for row in rows)} of {len(rows)} right", flush=True)
    return 0 if all(row.right for row in rows) else 1


def watch_all(scripts: list[Script], limit_s: float, each_s: float, keep: Path | None) -> Iterator[Row]:
    """Watch scripts one after the other; the next process gets ready meanwhile.

    Args:
        scripts: The scripts.
        limit_s: For all of them.
        each_s: For one.
        keep: Where the recordings of what was wrong stay.
    """
    begin = time.monotonic()
    following = ready(scripts[0], keep) if scripts else None
    try:
        for number, script in enumerate(scripts):
            process, following = following, None
            assert process is not None
            if number + 1 < len(scripts):
                following = ready(scripts[number + 1], keep)
            left = limit_s - (time.monotonic() - begin)
            if left > 1:
                row = watch(process, script, min(each_s, left))
            else:
                end(process)
                row = _failed(script, time.monotonic(), "no time was left")
            if keep is not None and row.right:
                (keep / f"{script.name}.twr").unlink(missing_ok=True)
            yield row
    finally:
        if following is not None:
            end(following)


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
