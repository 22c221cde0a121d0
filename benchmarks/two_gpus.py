"""Two GPUs over NCCL: every row of the goals, by every strategy, side by side in one run, under 8 minutes.

    timeout 470 torchrun --nproc-per-node 2 --max-restarts 3 benchmarks/two_gpus.py --out results
    torchrun --nproc-per-node 2 benchmarks/two_gpus.py --out results --rehearse  # gloo, sizes divided by 32

Writes one JSON file, after every row, and for some rows traces of both ranks with what `torchweave why` says of them.

A row that fails on both ranks alike is written down, and the next one goes on. Where one rank fails alone, the other
one waits in NCCL until its watchdog ends it, and torchrun starts both again: the row that was under way is written down
as failed then.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from peers import ways
from rows import grids_of, head, options, record_pair, told, write

from torchweave.engine.pair import engine
from torchweave.measure.bench import Bench, BenchOptions, Way
from torchweave.measure.limited import limited_group
from torchweave.measure.meeting import Meeting
from torchweave.measure.subject import Subject, SubjectOptions
from torchweave.measure.training import join

GROUP_LIMIT = timedelta(seconds=60)
# longer: the other rank may be waiting in a collective until its limit
MEETING_LIMIT_S = GROUP_LIMIT.total_seconds() + 15.0
NAME = "two_gpus.json"
FEWER = (16, 8)
REHEARSAL_DIVISOR, REHEARSAL_STEP = 32, 128
WHY_LIMIT_S = 60.0
# what torchrun gives its ranks, and what a torchrun inside must not see
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")


class Row(NamedTuple):
    """A line of the table of goals.

    Attributes:
        chunk: The chunk.
        hidden: Width of a token.
        channels: To how many the user's own group is limited, whoever runs the pair; None leaves that to NCCL.
        goal: The share that `auto` is to recover.
        layers: Layers of the model.
        peers: What stands beside weave: what people do today (`in_order`; `free`, with a second communicator), weave
            over `fewer` channels than the user's own group has, or nothing.
        traced: Whether traces are kept.
    """

    chunk: str
    hidden: int
    channels: int | None
    goal: float
    layers: int = 4
    peers: str = ""
    traced: bool = False


ROWS = (
    Row("moe", 4096, None, 0.90, peers="in_order", traced=True),
    Row("moe", 4096, 8, 0.92, peers="in_order", traced=True),
    Row("moe", 4096, 4, 0.92),
    Row("moe", 2048, None, 0.70),
    Row("moe", 1024, None, 0.0, layers=8),
    Row("dropless", 4096, None, 0.80),
    Row("dense", 4096, None, 0.80),
    Row("dense", 2048, None, 0.80),
    Row("moe", 7168, 8, 0.90),
    Row("moe", 7168, None, 0.90),
    Row("moe", 4096, None, 0.90, peers="fewer"),
    # last: nothing keeps two communicators of two free threads from waiting for each other
    Row("moe", 4096, None, 0.90, peers="free"),
)


class Run:
    """One rank of the whole run.

    Args:
        args: The options.
        device: Where this rank computes.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.rank = args, device, dist.get_rank()
        self.path = args.out / NAME
        world = dist.group.WORLD
        assert world is not None
        self.world, self.meeting = world, Meeting(world, MEETING_LIMIT_S)
        self.groups: dict[int | None, dist.ProcessGroup] = {None: world}
        self.communicators_mib: dict[str, float] = {}
        self.result = self._begin()

    def _begin(self) -> dict[str, Any]:
        """Return a new result, or the one of a run that was started again, with the row that it was at as failed."""
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and self.path.exists()
        if again:
            result = json.loads(self.path.read_text())
            if result["under_way"] is not None:
                why = "a rank ended while this was measured, and the run was started again"
                result["failed"].append({"number": result["under_way"], "error": why})
        else:
            command = f"torchrun --nproc-per-node {dist.get_world_size()} benchmarks/two_gpus.py {words(self.args)}"
            what = "rehearsal over gloo: sizes divided, nothing to be read as a result" if self.args.rehearse else ""
            result = head(what or "several GPUs over NCCL", command, self.device)
            result |= {"ranks": dist.get_world_size(), "begun": time.time()}
            result |= {"rows": [], "failed": [], "not_measured": [], "under_way": None}
        self.meeting.tell()  # everybody has read it
        return result

    def rows(self) -> None:
        done = {one["number"] for one in (*self.result["rows"], *self.result["failed"])}
        for number in self.args.rows:
            if number in done:
                continue
            late = time.time() - self.result["begun"] > self.args.limit_s
            # by one clock, so that all ranks decide alike
            if self.meeting.tell("late" if late else "")[0]:
                self.result["not_measured"].append({"number": number, **ROWS[number]._asdict()})
                continue
            self._row(number)
        self.result["communicators_mib"] = self.communicators_mib
        self._write()

    def _row(self, number: int) -> None:
        """Measure a row, or write down why it could not be measured; raise where only some ranks could."""
        row, begun = ROWS[number], time.monotonic()
        self.result["under_way"] = number
        self._write()
        found, error = {}, ""
        try:
            found = self._measure(number, row)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        self._clear()
        errors = self.meeting.tell(error)
        if any(errors):
            self._say(f"{row}: failed: {' | '.join(errors)}")
            self.result["failed"].append({"number": number, **row._asdict(), "error": errors})
            self.result["under_way"] = None
            self._write()
            if not all(errors):
                raise SystemExit(f"rank {errors.index('')} measured row {number}, another rank failed: {errors}")
            self._check_in_step()
            return
        took_s = round(time.monotonic() - begun, 1)
        self.result["rows"].append({"number": number, **row._asdict(), "took_s": took_s, **found})
        self.result["under_way"] = None
        self._say(f"{row} ({took_s} s): {told(found)}")
        self._write()

    def _measure(self, number: int, row: Row) -> dict[str, Any]:
        bench = Bench(
            BenchOptions(self._options(row), rounds=self.args.rounds),
            self.device,
            self._peers(row),
            self._group(row.channels),
        )
        found = bench.run(lambda *_: None)
        for name, one in found["strategies"].items():
            one["lines"] = ways.LINES.get(name, 1)
        with bench.subject.link:
            traces = [self._trace(bench.subject, row, number, strategy) for strategy in _traced(row, found)]
        found["traces"] = [one for of_all_ranks in traces for one in of_all_ranks]
        found["limit_share"] = self._limit_share(found)
        return found

    def _limit_share(self, found: Mapping[str, Any]) -> float | None:
        """Return what could be recovered at most if NCCL's channels took their SMs from the computation alone."""
        channels = [number for one in found["traces"] for number in one["channels_seen"]]
        gain = found["serial_ms"] - found["bound_ms"]
        if not channels or gain <= 0:
            return None
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return 1 - found["communication_ms"] * max(channels) / num_sms / gain

    def _options(self, row: Row) -> SubjectOptions:
        if not self.args.rehearse:
            return SubjectOptions(row.chunk, row.layers, row.hidden, self.args.tokens, 4)
        hidden = max(1, round(row.hidden / REHEARSAL_DIVISOR / REHEARSAL_STEP)) * REHEARSAL_STEP
        return SubjectOptions(row.chunk, 1, hidden, 128, 1, link_gbps=0.0)

    def _peers(self, row: Row) -> Callable[[Subject], Mapping[str, Way]] | None:
        if row.peers == "free":
            return lambda subject: ways.free(subject, self._group(-1))
        if row.peers == "fewer":
            return lambda subject: ways.over(subject, {channels: self._group(channels) for channels in FEWER})
        return ways.in_order if row.peers else None

    def _group(self, channels: int | None) -> dist.ProcessGroup:
        """Return the group that is limited so; it is made when it is first needed, on all ranks. -1: a second one."""
        if channels not in self.groups:
            x = torch.zeros(dist.get_world_size() << 20, device=self.device)
            y = torch.empty_like(x)
            free = self._free_mib()
            self.groups[channels] = group = limited_group(None if channels == -1 else channels, GROUP_LIMIT)
            dist.all_to_all_single(y, x, group=group)
            dist.all_reduce(x, group=group)
            if free is not None:
                # with what the first collectives of each form connect
                name = "a second one" if channels == -1 else f"{channels} channels"
                self.communicators_mib[name] = free - (self._free_mib() or 0.0)
        return self.groups[channels]

    def _free_mib(self) -> float | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] / 2**20

    def _trace(self, subject: Subject, row: Row, number: int, strategy: str) -> list[dict[str, Any]]:
        """Record a pair on every rank and return what each rank's trace holds, and what `torchweave why` says of it."""
        name = f"row{number}_{row.chunk}{row.hidden}_{row.channels or 'default'}ch_rank{self.rank}_{strategy}.json.gz"
        path = self.args.out / name
        own = record_pair(subject, strategy, path, functools.partial(dist.barrier, subject.group))
        one = {
            "rank": self.rank,
            "strategy": strategy,
            "hidden_share": own.hidden_share,
            "channels_seen": grids_of(path),
            "bytes": path.stat().st_size,
        }
        if row.traced:
            one |= {"file": name, **_why(path, own.hidden_share)}
        else:
            path.unlink()
        return [json.loads(said) for said in self.meeting.tell(json.dumps(one))]

    def _check_in_step(self) -> None:
        for group in self.groups.values():
            x = torch.full((3,), 2.0, device=self.device)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2.0 * dist.get_world_size()] * 3, "a group is out of step"

    def _clear(self) -> None:
        ways.restore()
        engine().close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _write(self) -> None:
        if self.rank == 0:
            write(self.path, self.result)

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def _traced(row: Row, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is traced: serial where the number of channels is to be seen, and what weaves."""
    if row.traced:
        return ("serial", "turns" if found["auto_takes"] == "serial" else found["auto_takes"])
    return ("serial",) if row.channels is not None else ()


def _why(path: Path, own_share: float | None) -> dict[str, Any]:
    """Return what `torchweave why` says of a trace, and whether its hidden share is within 1 % of our own."""
    from torchweave.diagnose.ranks import diagnose_files

    found = diagnose_files([path])
    if found.errors:
        return {"why": str(found.errors[0]).replace(str(path), path.name)}
    (diagnosis,) = found.diagnoses
    communication = diagnosis.communication
    said = {"why": diagnosis.sentence, "why_hidden_share": communication.hidden_share if communication else None}
    if communication is not None and own_share is not None:
        said["within_1_percent"] = abs(communication.hidden_share - own_share) <= 0.01
    return said


def why_script(ranks: int) -> dict[str, Any]:
    """Run `torchweave why` on a script under a torchrun of its own, and return what it says of every rank."""
    script = Path(__file__).parent / "two_gpus_script.py"
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "torchweave",
    ]
    words += ["why", "--json", str(script)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=WHY_LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired as late:
        return {"error": f"it did not end within {late.timeout:g} s"}
    said = {"command": f"torchrun --nproc-per-node {ranks} -m torchweave why --json two_gpus_script.py"}
    said |= {"exit_code": done.returncode, "took_s": round(time.monotonic() - begun, 1)}
    try:
        return {**said, "ranks": json.loads(done.stdout)}
    except ValueError:
        return {**said, "output": done.stdout[-2000:], "error": done.stderr[-2000:]}


def words(args: argparse.Namespace) -> str:
    """Return the options that were chosen, as they are written."""
    found = [f"--rounds {args.rounds}"]
    found += [f"--rows {' '.join(map(str, args.rows))}"] if list(args.rows) != list(range(len(ROWS))) else []
    return " ".join([*found, *(["--rehearse"] if args.rehearse else [])])


def main() -> None:
    parser = options(__doc__, len(ROWS), limit_s=340.0)
    parser.add_argument("--rehearse", action="store_true", help="small sizes, gloo: to see that the script runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.rehearse and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        raise SystemExit("two_gpus.py needs a CUDA device for each rank, or --rehearse")
    device = join(GROUP_LIMIT)
    run = Run(args, device)
    run.rows()
    ranks = dist.get_world_size()
    dist.destroy_process_group()
    if run.rank == 0:
        run.result["why_script"] = why_script(ranks)
        run.result["took_s"] = round(time.time() - run.result["begun"], 1)
        write(run.path, run.result)


if __name__ == "__main__":
    main()
