"""Two GPUs over NCCL: pipelines and adapters, woven and serial side by side, in one result file.

    torchrun --nproc-per-node 2 benchmarks/two_gpu_pipeline.py --out results
    python benchmarks/two_gpu_pipeline.py --out /tmp/results --rehearse

Each part runs on two processes of its own, started by rank 0: what fails or hangs in one is written down, its processes
are stopped, and the next goes on. The result is written after every part, and a part that is cut short keeps its rows.
`--rehearse` tries all of it out with gloo on CPUs at tiny sizes: its times mean nothing, and the result says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from torchweave.errors import TorchweaveError
from torchweave.measure import launch

RANKS = 2
END_S = 25.0  # a part looks at the time between its rows: what the last of them may take, and its processes' end


class Part(NamedTuple):
    """A part: where it is, and how long it may take, its processes' start included."""

    module: str
    function: str
    seconds: float


PARTS = {
    "experts": Part("two_gpu.training", "experts", 80.0),
    "pipelines": Part("two_gpu.training", "pipelines", 95.0),
    "transfers": Part("two_gpu.shown", "transfers_hidden", 45.0),
    "torch": Part("two_gpu.frameworks", "torch_pipelining", 50.0),
    "deepseek": Part("two_gpu.frameworks", "deepseek", 40.0),
    "megatron": Part("two_gpu.frameworks", "megatron", 50.0),
    "bubbles": Part("two_gpu.shown", "bubbles", 85.0),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the result and a trace of each rank")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--limit-s", type=float, default=465.0, help="no part measures after this (default: 465)")
    add("--rehearse", action="store_true", help="try it out with gloo on CPUs, at tiny sizes")
    add("--small", action="store_true", help="at tiny sizes: whether it runs, and is equal, and nothing about times")
    add("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # this process is a rank of that part
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.small |= args.rehearse
    return args


def main() -> int:
    args = parse()
    if args.part is not None:
        return run_rank(args)
    if int(os.environ.get("RANK", "0")):
        return 0  # torchrun's other processes have nothing to do: rank 0 starts all that measure
    begun = time.monotonic()
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"two_gpu_pipeline{'_rehearsal' if args.rehearse else ''}.json"
    result = head(args)
    with tempfile.TemporaryDirectory(prefix="two-gpu-") as folder:
        for name in args.parts:
            left_s = args.limit_s - (time.monotonic() - begun)
            result["parts"][name] = run_part(name, args, Path(folder), left_s)
            result["seconds"] = time.monotonic() - begun
            # written after every part: a run that is cut short keeps what it has
            target.write_text(json.dumps(result, indent=1) + "\n")
    ended = {name: part["status"] for name, part in result["parts"].items()}
    print(f"wrote {target}: {', '.join(f'{name} {status}' for name, status in ended.items())}", flush=True)
    return 0 if all(status == "done" for status in ended.values()) else 1


def head(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the result says before any part."""
    import torch

    from torchweave.measure.training import name_of, num_gpus, versions

    gpus = num_gpus()
    device = torch.device("cuda", 0) if gpus >= RANKS and not args.rehearse else torch.device("cpu")
    if device.type == "cpu" and not args.rehearse:
        raise SystemExit(f"{RANKS} GPUs are needed, and {gpus} are there; --rehearse tries it out on CPUs")
    result: dict[str, Any] = {
        "what": "two GPUs over NCCL: pipelines and adapters",
        "rehearsal": args.rehearse,
        "command": "torchrun --nproc-per-node 2 benchmarks/two_gpu_pipeline.py "
        + " ".join(["--out DIR", "--parts", *args.parts, *shared_words(args)]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": name_of(device),
        "versions": {**versions(device), **framework_versions()},
        "parts": {},
    }
    if args.rehearse:
        result["what"] += "; a rehearsal with gloo on CPUs at tiny sizes, whose times mean nothing"
    elif args.small:
        result["what"] += "; at tiny sizes, whose times mean nothing"
    return result


def shared_words(args: argparse.Namespace) -> list[str]:
    """Return the words that every rank of every part is started with."""
    return [f"--{name}" for name in ("rehearse", "small") if getattr(args, name)]


def framework_versions() -> dict[str, str]:
    """Return the versions of the frameworks that are installed."""
    from importlib import metadata

    found = {}
    for name in ("dualpipe", "megatron-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def run_part(name: str, args: argparse.Namespace, work: Path, left_s: float) -> dict[str, Any]:
    """Run a part on processes of its own; return what it found, how it ended, and why if not well."""
    part = PARTS[name]
    seconds = min(part.seconds * (2 if args.rehearse else 1), left_s - END_S)
    if seconds <= 0:
        return {"status": "not begun: the time was over"}
    print(f"--- {name}, at most {seconds:.0f} s", flush=True)
    begun = time.monotonic()
    words = ["--part", name, "--work", str(work), "--out", str(args.out), "--seconds", str(seconds)]
    words += shared_words(args)
    status, errors = "done", []
    try:
        launch.start_ranks(words, RANKS, limit_s=seconds + END_S, program=[str(Path(__file__).resolve())])
    except TorchweaveError as error:
        status, errors = "failed", [str(error)]
    errors += [path.read_text() for path in sorted(work.glob(f"{name}.rank*.error"))]
    found = work / f"{name}.json"
    content = json.loads(found.read_text()) if found.exists() else {}
    if content.get("cut_short") and status == "done":
        status = "cut short"
    if errors:
        print("\n".join(errors), file=sys.stderr, flush=True)
    return {
        "status": status,
        **({"errors": errors} if errors else {}),
        "seconds": time.monotonic() - begun,
        **content,
    }


def run_rank(args: argparse.Namespace) -> int:
    """Be a rank of a part."""
    end = time.monotonic() + args.seconds
    rank = os.environ["RANK"]
    try:
        import importlib

        import torch.distributed as dist
        from two_gpu.setup import SMALL, Report, Setup, Sizes

        from torchweave.engine.pair import choices, engine
        from torchweave.measure.training import join

        part = PARTS[args.part]
        sizes = SMALL if args.small else Sizes()
        device = join()
        if (device.type == "cpu") != args.rehearse:
            raise SystemExit(f"the ranks are on {device}: each needs a GPU of its own, or --rehearse")
        setup = Setup(device, sizes, Report(args.work / f"{args.part}.json"), args.out, args.work, end)
        setup.report.set(sizes=setup.said())
        getattr(importlib.import_module(part.module), part.function)(setup)
        setup.report.set(choices=[str(choice) for choice in choices()])
        engine().close()
        dist.destroy_process_group()
    except BaseException:
        (args.work / f"{args.part}.rank{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()[-4000:]}")
        # at once: to leave a group in order needs the other rank
        sys.stdout.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
