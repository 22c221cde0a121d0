"""Everything that takes a GPU, in one command: the tests and the measurements, several at once where there are devices.

    python benchmarks/on_gpus.py --out RESULTS                  (all that the devices suffice for)
    python benchmarks/on_gpus.py --out RESULTS --steps tests goals

Each step has devices of its own, a time limit and a log, `RESULTS/STEP.log`; a step that fails or runs too long ends
alone. `RESULTS/steps.json` says how each ended, from the first one on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PERIOD_S = 0.2
GRACE_S = 10.0


@dataclass(frozen=True)
class Step:
    """Something to run.

    Attributes:
        command: Its words; `{out}` is the folder for results, `{python}` this Python.
        devices: How many devices it takes.
        limit_s: Seconds until it is ended.
    """

    command: str
    devices: int = 1
    limit_s: float = 540.0


# a rank that ends costs the row that it was at
TORCHRUN = "{python} -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 --max-restarts 3"
STEPS = {
    "tests": Step("{python} -m pytest tests/gpu --ignore tests/gpu/two -q -p no:cacheprovider"),
    "two_tests": Step("{python} -m pytest tests/gpu/two -q -p no:cacheprovider", devices=2, limit_s=480.0),
    "two_gpus": Step(f"{TORCHRUN} benchmarks/two_gpus.py --out {{out}}", devices=2),
    "doctor": Step("{python} -m torchweave doctor --json", limit_s=120.0),
    "watch_1": Step("{python} benchmarks/watch_scripts.py --part 1/2 --out {out}/watch_1.json"),
    "watch_2": Step("{python} benchmarks/watch_scripts.py --part 2/2 --out {out}/watch_2.json"),
    # the recording of the question's script that the README shows
    "question": Step(
        "{python} -m torchweave why --save {out}/question.twr tests/gpu/scripts/seed_overlapped_forward_backward.py",
        limit_s=60.0,
    ),
    "goals": Step("{python} benchmarks/one_gpu.py --out {out} --limit-s 480"),
    "peers": Step("{python} benchmarks/peers_run.py --out {out}", limit_s=300.0),
    "pipeline": Step("{python} benchmarks/pipeline_one_gpu.py --out {out}/pipeline_one_gpu.json", limit_s=300.0),
    "two_pipeline": Step("{python} benchmarks/two_gpu_pipeline.py --out {out}", devices=2, limit_s=500.0),
}


@dataclass
class Running:
    """A step that has begun."""

    name: str
    process: subprocess.Popen[bytes]
    devices: list[str]
    begun: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--steps", nargs="+", choices=STEPS, metavar="STEP", help=", ".join(STEPS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    free = devices()
    names = args.steps or [name for name, step in STEPS.items() if step.devices <= len(free)]
    ended = run(names, free, args.out.resolve())
    for name, how in ended.items():
        print(f"{name:<12} {how['ended']:<14} {how['seconds']:6.0f} s")
    sys.exit(any(how["ended"] != "0" for how in ended.values()))


def devices() -> list[str]:
    """Return the devices that may be used, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60)
    return [str(index) for index in range(len(listed.stdout.splitlines()))]


def run(names: list[str], free: list[str], out: Path) -> dict[str, dict[str, object]]:
    """Run steps in their order, as many at once as devices allow.

    Args:
        names: The steps.
        free: The devices.
        out: The folder for results.

    Returns:
        For each step how it ended (its exit status, or why there is none), seconds, devices and the step itself.
    """
    ended: dict[str, dict[str, object]] = {}
    running: list[Running] = []

    def end(name: str, how: str, seconds: float, used: list[str]) -> None:
        ended[name] = {"ended": how, "seconds": round(seconds, 1), "on": used, **asdict(STEPS[name])}
        (out / "steps.json").write_text(json.dumps(ended, indent=1))

    total = len(free)
    waiting = list(names)
    while waiting or running:
        for name in [name for name in waiting if STEPS[name].devices > total]:
            waiting.remove(name)
            end(name, f"{STEPS[name].devices} devices", 0.0, [])
        while waiting and STEPS[waiting[0]].devices <= len(free):
            running.append(_begin(waiting.pop(0), free, out))
        for one in list(running):
            seconds = time.monotonic() - one.begun
            status = one.process.poll()
            if status is None and seconds < STEPS[one.name].limit_s:
                continue
            _end_all_of(one.process)
            running.remove(one)
            free += one.devices
            end(one.name, "too long" if status is None else str(status), seconds, one.devices)
        time.sleep(PERIOD_S)
    return ended


def _begin(name: str, free: list[str], out: Path) -> Running:
    step = STEPS[name]
    taken = [free.pop(0) for _ in range(step.devices)]
    words = step.command.format(python=sys.executable, out=out).split()
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken), "PYTHONUNBUFFERED": "1"}
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return Running(name, process, taken, time.monotonic())


def _end_all_of(process: subprocess.Popen[bytes]) -> None:
    """End a step with all that it started; it leads a process group of its own, and torchrun ends its own ranks."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, sign)
            process.wait(GRACE_S)


if __name__ == "__main__":
    main()
