"""Plant faults of the rules' kinds into code of real packages, and count how many `torchweave check` finds.

    python benchmarks/plant_faults.py PACKAGES --seed 0 --faults 100

PACKAGES is a folder with unpacked packages (`pip download --no-deps`, unzipped). Each fault is put into a file of
theirs that is chosen at random: as a function, a method, inside an existing function, nested in what people nest code
in, with the imports written in one of the usual ways. A fault counts as found if `check` names its cause on the line
marked as the culprit and had not named it on that line without the fault.

The forms are written from the description of the rules and from public reports of the mistakes, not from what the
rules find.
"""

import argparse
import ast
import json
import platform
import random
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

from fault_forms import CULPRIT, KINDS, Fault, Style, a_style

from torchweave.errors import TorchweaveError
from torchweave.source import check_source

# -- where it goes


def nested(rng: random.Random, body: str, torch: str) -> str:
    """Nest a body as people nest code."""
    indent = lambda text: textwrap.indent(text, "    ")  # noqa: E731
    way = rng.choice(["", "", "if", "try", "with", "else"])
    if way == "if":
        return f"if inputs is not None:\n{indent(body)}"
    if way == "try":
        return f"try:\n{indent(body)}\nexcept ValueError:\n    raise"
    if way == "with":
        return f"with {torch}.cuda.device(0):\n{indent(body)}"
    if way == "else":
        return f"if inputs is None:\n    inputs = []\nelse:\n{indent(body)}"
    return body


def planted(rng: random.Random, text: str, fault: Fault, style: Style) -> str | None:
    """Return a file's text with the fault in it, None where it has no place for it."""
    tree = ast.parse(text)
    lines = text.splitlines()
    body = nested(rng, fault.body, style.torch)
    head = _first_line_of_code(tree)
    imports = list(dict.fromkeys([*style.imports, *fault.imports]))
    parameters = ", ".join(fault.parameters)
    where = rng.choice(["function", "method", "new_class", "inside", "inside"])
    if where == "inside":
        functions = [
            node for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.body[0].lineno > node.lineno
            and not _assigns(node, style)
        ]  # fmt: skip
        if not functions:
            return None
        node = rng.choice(functions)
        first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return None
        given = "".join(
            f"{name} = globals()[{name!r}]\n"
            for name in fault.parameters
            if name not in {a.arg for a in node.args.args}
        )
        # the names that people's functions get their data by
        code = textwrap.indent(given + body, " " * first.col_offset)
        at = first.lineno - 1 - (len(first.decorator_list) if isinstance(first, (ast.FunctionDef, ast.ClassDef)) else 0)
        lines[at:at] = code.splitlines()
    elif where == "method":
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.col_offset == 0]
        if not classes:
            return None
        node = rng.choice(classes)
        code = f"\ndef _planted(self, {parameters}):\n{textwrap.indent(body, '    ')}\n"
        at = node.end_lineno or node.lineno
        lines[at:at] = textwrap.indent(code, " " * node.body[0].col_offset).splitlines()
    elif where == "new_class":
        code = f"class _Planted:\n    def run(self, {parameters}):\n{textwrap.indent(body, '        ')}\n"
        lines += ["", "", *code.splitlines()]
    else:
        lines += ["", "", *f"def _planted({parameters}):\n{textwrap.indent(body, '    ')}".splitlines()]
    lines[head:head] = [*imports, *fault.helpers.splitlines()]
    result = "\n".join(lines) + "\n"
    try:
        ast.parse(result)
    except SyntaxError:
        return None
    return result


def _assigns(node: ast.FunctionDef, style: Style) -> bool:
    """Return whether a function has names of its own that would change what the fault means."""
    used = {style.torch, style.cuda.partition(".")[0], style.stream.partition(".")[0], style.clock.partition(".")[0],
            style.dist.partition(".")[0], "os", "environ", "time", "timeit", "np"}  # fmt: skip
    own = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    own |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    own |= {
        alias.asname or alias.name
        for one in ast.walk(node)
        if isinstance(one, (ast.Import, ast.ImportFrom))
        for alias in one.names
    }
    return bool(used & own) or any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(node))


def _first_line_of_code(tree: ast.Module) -> int:
    """Return the index of the line after the docstring and `__future__` imports."""
    at = 0
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (docstring or future):
            break
        at = node.end_lineno or at
    return at


def _readable(path: Path) -> str | None:
    """Return a file's text, None for one that cannot be checked."""
    try:
        text = path.read_text(encoding="utf-8")
        check_source(text, str(path))
    except (UnicodeDecodeError, TorchweaveError):
        return None
    return text


def plant(rng: random.Random, files: list[Path], number: int, *, show: bool) -> dict:
    """Plant faults and count what is found."""
    planted_by, found_by, missed = Counter(), Counter(), []
    while sum(planted_by.values()) < number:
        kind, style, path = KINDS[sum(planted_by.values()) % len(KINDS)], a_style(rng), rng.choice(files)
        text = _readable(path)
        fault = kind(rng, style)
        code = planted(rng, text, fault, style) if text is not None else None
        if code is None:
            continue
        rows = code.splitlines()
        (culprit,) = [row for row, line in enumerate(rows, 1) if line.endswith(CULPRIT)]
        planted_by[fault.cause] += 1
        if any((one.cause, one.line) == (fault.cause, culprit) for one in check_source(code, str(path))):
            found_by[fault.cause] += 1
            continue
        missed.append({"cause": fault.cause, "form": fault.form, "file": "/".join(path.parts[-3:])})
        if show:
            print(f"--- {fault.cause}/{fault.form} in {path}", *rows[max(0, culprit - 14) : culprit + 3], sep="\n")
    return {
        "planted": sum(planted_by.values()),
        "found": sum(found_by.values()),
        "by_cause": {cause: {"planted": planted_by[cause], "found": found_by[cause]} for cause in sorted(planted_by)},
        "missed": missed,
    }


_WAIT = re.compile(r"^\s*[\w.()\[\]]+\.(wait_stream|wait_event)\([^()]*(\([^()]*\))?[^()]*\)\s*$")


def remove_waits(rng: random.Random, files: list[Path], number: int) -> dict:
    """Remove real waits of streams, one at a time, and count how often that is found.

    What the wait was for is mostly made elsewhere (parameters, attributes), where `check` keeps quiet on purpose: the
    share says how much it cannot see.
    """
    waits = [
        (path, row)
        for path in files
        for row, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines())
        if _WAIT.match(line)
    ]
    chosen = waits if len(waits) <= number else rng.sample(waits, number)
    removed = found = 0
    for path, row in chosen:
        text = _readable(path)
        if text is None:
            continue
        rows = text.splitlines()
        rows[row] = rows[row][: len(rows[row]) - len(rows[row].lstrip())] + "pass"
        before = {(one.line, one.cause) for one in check_source(text)}
        after = {(one.line, one.cause) for one in check_source("\n".join(rows) + "\n")}
        removed += 1
        found += any(cause == "missing_wait" for _, cause in after - before)
    return {"waits_in_all": len(waits), "removed": removed, "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="a folder of unpacked packages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--remove-waits", type=int, default=0, help="also remove so many real waits")
    parser.add_argument("--json", type=Path, help="also write the counts here")
    parser.add_argument("--show", action="store_true", help="print the code of what was missed")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    files = sorted(path for path in args.packages.rglob("*.py") if 500 < path.stat().st_size < 60_000)
    result = {
        "command": f"python benchmarks/plant_faults.py PACKAGES --seed {args.seed} --faults {args.faults}",
        "packages": sorted(path.name for path in args.packages.iterdir() if path.is_dir()),
        "python": platform.python_version(),
        **plant(rng, files, args.faults, show=args.show),
    }
    if args.remove_waits:
        result["real_waits"] = remove_waits(rng, files, args.remove_waits)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
