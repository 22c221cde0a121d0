"""Whether the mends are real: scripts that lose their overlap for a known reason, before and after the report's mend.

    python benchmarks/mends.py --out FOLDER

For each recoverable cause of which there is a script (`mend_cases.py`), the script and its mended form are recorded
with torch.profiler on one CUDA device and diagnosed. The terminal shows a table, FOLDER/mends.json holds everything.
Scripts that need a process or an environment of their own get one. Exit code 1 if a case could not be measured.

    python benchmarks/mends.py --case host_sync --case same_stream

measures single cases in this process, with its environment as it is, and prints each result as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from mend_cases import CASES, Case, Variant
from torch.profiler import ProfilerActivity, profile

from torchweave import __version__
from torchweave.diagnose.causes import all_causes
from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.trace.read import read

Result = dict[str, Any]

VARIANTS = ("before", "after")
# a mended script is recorded again if the first recording does not overlap: hosts are noisy
NUM_ATTEMPTS = 2
SHARED_LIMIT_S, OWN_LIMIT_S, TOTAL_LIMIT_S = 75.0, 25.0, 105.0
# variables that single cases set, and no other may inherit
SCRUBBED = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
NOT_MEASURED = {
    "timed_without_sync": "Its mend changes what the host's clock reads, not what the device does: a trace before "
    "and one after show the same overlap.",
}


# ------------------------------------------------------------------------------------------------- in a child process
def record(variant: Variant, state: dict[str, Any], path: Path) -> None:
    """Record one run of a script's body into a trace file."""
    detailed = torch._C._profiler._ExperimentalConfig(profile_all_threads=True, enable_cuda_sync_events=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    if variant.prepare is not None:
        variant.prepare(state)
    torch.cuda.synchronize()
    time.sleep(0.02)
    with profile(activities=activities, with_stack=True, record_shapes=True, experimental_config=detailed) as recorder:
        variant.body(state)
        torch.cuda.synchronize()
    recorder.export_chrome_trace(str(path))


def warm_up_recorder() -> None:
    """Create the context and start the recorder once: both cost their time at their first use."""
    ones = torch.ones(8, 8, device="cuda")
    torch.mm(ones, ones)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        ones.add_(1)
        torch.cuda.synchronize()


def measure(case: Case, variant: Variant) -> Diagnosis:
    """Set a script up, warm it up, record it and diagnose the recording."""
    state = variant.setup()
    for _ in range(variant.num_warm):
        if variant.prepare is not None:
            variant.prepare(state)
        variant.body(state)
        torch.cuda.synchronize()
    if variant.num_warm == 0:
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record(variant, state, path)
        return diagnose(read(path), between=case.between)


def measure_all(case: Case, which: str) -> Result:
    """Measure one form of a case, the mended one again if it does not overlap, and return its numbers."""
    variant: Variant = getattr(case, which)
    again = which == "after" and not variant.own_process and not case.remark
    verdicts = []
    for _ in range(NUM_ATTEMPTS if again else 1):
        found = measure(case, variant)
        torch.cuda.empty_cache()
        verdicts.append(found.verdict)
        if found.verdict == "overlapped":
            break
    return as_record(found) | {"verdicts": verdicts}


def as_record(found: Diagnosis) -> Result:
    names = ("span_ms", "busy_ms", "overlapped_ms", "possible_ms", "lost_ms", "idle_ms")
    causes = [
        {
            "cause": item.cause,
            "lost_ms": round(item.lost_ms, 3),
            "idle_ms": round(item.idle_ms, 3),
            "recoverable": item.recoverable,
            "certainty": item.certainty,
            "evidence": item.evidence,
        }
        for item in found.causes
    ]
    return {
        "verdict": found.verdict,
        "sentence": found.sentence,
        "sides": list(found.sides.names),
        **{name: round(getattr(found.numbers, name), 3) for name in names},
        "causes": causes,
    }


def run_cases(cases: list[Case], which: list[str]) -> int:
    """Measure cases in this process and print a line of JSON for each; stop where the device is lost."""
    warm_up_recorder()
    for case in cases:
        for name in which:
            print(json.dumps({"begin": [case.name, name]}), flush=True)
            begin = time.perf_counter()
            line: Result = {"case": case.name, "variant": name, "device": torch.cuda.get_device_name()}
            try:
                line["found"] = measure_all(case, name)
            except Exception as error:  # whatever it is, the other cases shall run
                line["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            line["seconds"] = round(time.perf_counter() - begin, 2)
            print(json.dumps(line), flush=True)
            if "error" in line:
                # raises where the error has spoiled the context: the parent starts another process
                torch.cuda.synchronize()
    return 0


# ------------------------------------------------------------------------------------------------- in the parent
@dataclass
class Child:
    """A process that measures forms of cases, one after the other.

    Attributes:
        cases: What it shall measure.
        which: Which forms.
        env: Environment variables that it gets beside the inherited ones.
        limit_s: After this time it is stopped.
    """

    cases: list[Case]
    which: list[str]
    env: dict[str, str] = field(default_factory=dict)
    limit_s: float = OWN_LIMIT_S
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process; it imports everything and then waits for its turn on the device."""
        env = {name: value for name, value in os.environ.items() if name not in SCRUBBED} | self.env
        command = [sys.executable, str(Path(__file__)), "--wait"]
        command += [word for case in self.cases for word in ("--case", case.name)]
        command += [word for name in self.which for word in ("--variant", name)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def results(self, deadline: float) -> Iterator[Result]:
        """Give the process its turn, and yield what it printed; then why it ended, if something is missing."""
        if self.process is None:
            self.start()
        assert self.process is not None
        limit = max(1.0, min(self.limit_s, deadline - time.monotonic()))
        try:
            out, err = self.process.communicate("go\n", timeout=limit)
            why = f"the process ended with {self.process.returncode}: {(err.strip().splitlines() or ['?'])[-1][:200]}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            why = f"stopped after {limit:.0f} s"
        yield from self.read_lines(out, why)

    def read_lines(self, out: str, why: str) -> Iterator[Result]:
        """Yield the results that were printed, and for each missing one that it failed or was not begun."""
        missing = [(case.name, name) for case in self.cases for name in self.which]
        begun = set()
        for text in out.splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # some other output, or a line cut by the end of the process
                continue
            if not isinstance(line, dict):
                continue
            if "begin" in line:
                begun.add(tuple(line["begin"]))
            else:
                missing.remove((line["case"], line["variant"]))
                yield line
        for case, name in missing:
            yield {"case": case, "variant": name, "error": why, "not_begun": (case, name) not in begun}

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def plan() -> list[Child]:
    """Return the processes: one for all cases that can share one, and one for each form that cannot."""
    shared = [case for case in CASES if not case.before.own_process]
    children = [Child(shared, list(VARIANTS), limit_s=SHARED_LIMIT_S)]
    for case in CASES:
        if case.before.own_process:
            children += [Child([case], [name], dict(getattr(case, name).env)) for name in VARIANTS]
    return children


def run_children(children: list[Child]) -> dict[tuple[str, str], Result]:
    """Let each process have its turn on the device; cases that one could not begin get another process."""
    deadline = time.monotonic() + TOTAL_LIMIT_S
    results: dict[tuple[str, str], Result] = {}
    # all import at once, and then take turns
    for child in children:
        child.start()
    try:
        while children:
            child = children.pop(0)
            for line in child.results(deadline):
                results[line["case"], line["variant"]] = line
            rest = left_over(child, results)
            if 0 < len(rest) < len(child.cases) and time.monotonic() < deadline:
                children.append(Child(rest, child.which, child.env, child.limit_s))
    finally:
        for child in children:
            child.stop()
    return results


def left_over(child: Child, results: dict[tuple[str, str], Result]) -> list[Case]:
    """Return the cases of which no form was begun."""
    return [
        case for case in child.cases if all(results[case.name, name].get("not_begun", False) for name in child.which)
    ]


# ------------------------------------------------------------------------------------------------- what came out
def outcome(case: Case, results: dict[tuple[str, str], Result]) -> Result:
    """Put the two forms of a case together."""
    lines = {name: results.get((case.name, name), {"error": "not measured"}) for name in VARIANTS}
    record: Result = {"case": case.name, "cause": case.cause, "script": case.script, "mend": case.mend}
    errors = {name: line["error"] for name, line in lines.items() if "error" in line}
    for name, line in lines.items():
        record[name] = line.get("found")
    after = record["after"]
    record["mended"] = None if after is None else after["verdict"] == "overlapped"
    record["why_not"] = None if after is None or record["mended"] else why_not(case, after)
    record["errors"] = errors
    return record


def why_not(case: Case, after: Result) -> str:
    """Say in words why a mended script did not overlap, as its own report does."""
    texts = [case.remark] if case.remark else []
    texts.append(after["sentence"])
    for item in after["causes"]:
        if item["lost_ms"] >= 0.1 * after["lost_ms"] > 0:
            kind = "recoverable" if item["recoverable"] else "not recoverable"
            texts.append(f"{item['cause']} ({kind}) cost {item['lost_ms']:.3f} ms of it: {item['evidence']}")
    return " ".join(texts)


def show(records: list[Result], seconds: float) -> None:
    head = ("cause", "verdict", "lost ms", "overlapped ms")
    print(f"{head[0]:32} {head[1]:32} {head[2]:>22} {head[3]:>22}")
    for record in records:
        before, after = (record[name] or {} for name in VARIANTS)
        verdicts = f"{before.get('verdict', 'error')} -> {after.get('verdict', 'error')}"
        columns = []
        for key in ("lost_ms", "overlapped_ms"):
            one, other = (f"{found[key]:.3f}" if found else "?" for found in (before, after))
            columns.append(f"{one} -> {other}")
        print(f"{record['case']:32} {verdicts:32} {columns[0]:>22} {columns[1]:>22}")
    for record in records:
        if record["why_not"]:
            print(f"\n{record['case']}: {record['why_not']}")
        for name, error in record["errors"].items():
            print(f"\n{record['case']}, {name}: {error}")
    mended = sum(record["mended"] is True for record in records)
    print(f"\n{mended} of {len(records)} mended scripts overlap; {seconds:.0f} s.")


def summary(records: list[Result], device: str, seconds: float) -> Result:
    recoverable = {about.name for about in all_causes() if about.recoverable}
    measured = {case.cause for case in CASES}
    return {
        "schema": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python benchmarks/mends.py --out FOLDER",
        "device": device,
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "torchweave": __version__,
        },
        "seconds": round(seconds, 1),
        "causes": records,
        "not_measured": NOT_MEASURED,
        "without_script": sorted(recoverable - measured - set(NOT_MEASURED)),
        "not_recoverable_any_more": sorted(measured - recoverable),
    }


def run_all(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    results = run_children(plan())
    seconds = time.monotonic() - begin
    records = [outcome(case, results) for case in CASES]
    devices = sorted({line["device"] for line in results.values() if "device" in line})
    whole = summary(records, ", ".join(devices) or "none", seconds)
    (folder / "mends.json").write_text(json.dumps(whole, indent=1) + "\n")
    show(records, seconds)
    return 1 if any(record["errors"] for record in records) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="measure all cases and write mends.json there")
    names = {case.name: case for case in CASES}
    parser.add_argument("--case", action="append", choices=sorted(names), metavar="NAME", help="one case, in here")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="one form of it; both by default")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.out is None) == (args.case is None):
        parser.error("give --out FOLDER, or --case NAME")
    if args.out is not None:
        return run_all(args.out)
    if args.wait:
        sys.stdin.readline()
    return run_cases([names[name] for name in args.case], args.variant or list(VARIANTS))


if __name__ == "__main__":
    sys.exit(main())
