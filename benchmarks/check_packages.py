"""Run `torchweave check` over unpacked packages, and list what it finds, for somebody to read and judge.

    python benchmarks/check_packages.py PACKAGES... --json found.json [--sample 100 --seed 0] [--judged judged.json]

Each of PACKAGES is a folder of one package, named `name-version` (`pip download --no-deps`, unzipped). A judgement is
a list of {"file", "line", "reason"}, the false alarms; the result then holds them, and the share that they are of what
was read. Nothing else decides what counts as false.
"""

import argparse
import json
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path

from torchweave.errors import TorchweaveError
from torchweave.source import check_file


def checked(package: Path) -> tuple[list[dict], dict]:
    """Return a package's findings, and what was read."""
    rows, unreadable = [], []
    files = sorted(package.rglob("*.py"))
    begin = time.process_time()
    for path in files:
        try:
            found = check_file(path)
        except TorchweaveError as error:
            unreadable.append(str(error))
            continue
        name = f"{package.name}/{path.relative_to(package).as_posix()}"
        rows += [
            {"file": name, "line": one.line, "cause": one.cause, "certainty": one.certainty, "why": one.why}
            for one in found
        ]
    about = {"files": len(files), "mbytes": round(sum(path.stat().st_size for path in files) / 1e6, 1)}
    return rows, {
        **about,
        "cpu_s": round(time.process_time() - begin, 1),
        "unreadable": unreadable,
        "findings": len(rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--sample", type=int, default=100, help="how many findings to read, chosen at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judged", type=Path, help="the false alarms among the sample")
    args = parser.parse_args()
    rows, packages = [], {}
    for package in args.packages:
        found, packages[package.name] = checked(package)
        rows += found
        print(package.name, packages[package.name], file=sys.stderr, flush=True)
    sample = rows if len(rows) <= args.sample else random.Random(args.seed).sample(rows, args.sample)
    alarms = json.loads(args.judged.read_text()) if args.judged else []
    read = {(row["file"], row["line"]) for row in sample}
    alarms = [alarm for alarm in alarms if (alarm["file"], alarm["line"]) in read]
    result = {
        "command": "python benchmarks/check_packages.py " + " ".join(path.name for path in args.packages),
        "python": platform.python_version(),
        "packages": packages,
        "findings_by_rule": dict(Counter(f"{row['cause']} ({row['certainty']})" for row in rows).most_common()),
        "read": len(sample),
        "seed": args.seed,
        "false_alarms": len(alarms),
        "false_alarm_share": round(len(alarms) / max(1, len(sample)), 3),
        "judged_false": alarms,
        "sample": sample,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
