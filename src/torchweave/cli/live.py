"""`torchweave why SCRIPT`: runs a program, watches it, and reports; where there is no device, reads its source."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchweave.cli.program import Words
from torchweave.errors import TorchweaveError, UnreadableInputError, UsageError

if TYPE_CHECKING:
    from torchweave.diagnose.ranks import Found
    from torchweave.record.device import Device
    from torchweave.record.ranks import Job
    from torchweave.record.script import Ending
    from torchweave.record.session import Recording

EXIT_LOST, EXIT_INTERRUPTED = 1, 130


def run_program(args: argparse.Namespace, words: Words) -> int:
    """Run the program that a command line names, watched.

    Args:
        args: The command's own options.
        words: The program.

    Returns:
        The program's exit code if it failed, else that of `torchweave why`; 0 on ranks of a job.
    """
    device = find_device()
    if device is None:
        return _without_device(words, as_json=args.json)
    from torchweave.record.ranks import announce, clean, fail, job_of
    from torchweave.record.script import Program, prepare

    program = Program(words.name, words.args, words.is_module)
    job = job_of(os.environ, args.save)
    if job is None and args.save is not None:
        _check_save(args.save)
    start = prepare(program)
    if job is not None:
        announce(job)
    with _output_apart(args.json), _ended_by_launcher(job is not None):
        ending, recording = _watched(args, device, start)
    try:
        if job is None:
            return _alone(args, recording, ending)
        if recording is None or not _give(job, recording):
            fail(job, ending.error or "it reached no device")
        return _as_rank(args, job, ending)
    finally:
        if job is not None and job.is_first:
            clean(job)


def find_device() -> Device | None:
    """Return the device to watch, None where there is none or torch is missing."""
    from torchweave import watching

    try:
        return watching.find_device()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None


def _watched(args: argparse.Namespace, device: Device, start: Any) -> tuple[Ending, Recording | None]:
    from torchweave.record.phases import DEFAULT_STEPS, Phases
    from torchweave.record.session import Session

    session = Session(device, Phases(args.skip, args.steps or DEFAULT_STEPS))
    session.begin()
    process, output = os.getpid(), sys.stdout
    error = "an error of torchweave"
    try:
        ending = start()
        error = ending.error or (f"exit code {ending.code}" if ending.code else "")
    finally:
        recording = session.end(error)
    if os.getpid() != process:
        # a child that the program forked, and that ran to the program's end: the report is its parent's
        _leave(ending.code)
    # the program may have put something else there, or closed it
    sys.stdout = sys.stderr if output is None or output.closed else output
    return ending, recording


def _leave(code: int) -> NoReturn:
    """End a forked child; torch's profiler, whose threads are its parent's, does not survive Python's own end there."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code)


def _alone(args: argparse.Namespace, recording: Recording | None, ending: Ending) -> int:
    if recording is None:
        raise TorchweaveError(
            "A program has to reach the steps that are to be watched",
            given=ending.error or "it ended before",
            remedy="mark steps by `torchweave.step()`, or leave `--skip` away",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.save) if args.save is not None else Path(folder) / "recording.twr"
        recording.save(path)
        if args.save is not None:
            print(f"torchweave: wrote {path}", file=sys.stderr)
        try:
            code = _report(args, [path])
        except UnreadableInputError:
            for note in filter(None, recording.log.notes):
                print(f"torchweave: {note}", file=sys.stderr)
            raise
    return ending.code if ending.code and not ending.interrupted else code


def _give(job: Job, recording: Recording) -> bool:
    """Put this rank's recording where the first rank looks for it."""
    from torchweave.record.ranks import recording_path

    try:
        recording.save(recording_path(job, job.rank))
    except TorchweaveError as error:
        print(f"torchweave: {error}", file=sys.stderr)
        return False
    return True


def _as_rank(args: argparse.Namespace, job: Job, ending: Ending) -> int:
    """Report for all ranks on the first one; a launcher takes every other code than 0 for a crash."""
    from torchweave.record.ranks import gather

    failed = ending.code if not ending.interrupted else EXIT_INTERRUPTED
    if not job.is_first:
        return failed
    found, missing = gather(job)
    told = [f"Rank {rank} gave no recording: {why}." for rank, why in sorted(missing.items())]
    if len(job.expected) < job.world:
        told.append(
            f"Only the {len(job.expected)} ranks of this host are in the report, of {job.world}: `--save FOLDER` on a "
            "file system that all ranks share gathers all."
        )
    if not found:
        raise TorchweaveError("A report needs a rank that reached the device", given=" ".join(told))
    _report(args, [found[rank] for rank in sorted(found)], told)
    return failed


def _report(args: argparse.Namespace, files: list[Path], told: list[str] | None = None) -> int:
    """Diagnose recordings, and print and write the reports."""
    from torchweave.cli.output import show, write
    from torchweave.cli.why import parse_window
    from torchweave.diagnose.ranks import diagnose_files

    several = told is not None
    found = diagnose_files(
        files,
        between=args.between,
        window_ms=parse_window(args.window),
        range_name=args.range_name,
        one_job=several,
    )
    for error in found.errors:
        if not several:
            raise error
    found = _named(found, args, told or [])
    if not found.diagnoses:
        raise UnreadableInputError("A report needs a rank with device work", given=" ".join(found.differences))
    write(found, files[0], html=args.html, perfetto=args.perfetto)
    show(found, as_json=args.json, as_list=several)
    lost = any(each.verdict not in ("overlapped", "nothing_to_overlap") for each in found.diagnoses)
    return EXIT_LOST if lost else 0


def _named(found: Found, args: argparse.Namespace, told: list[str]) -> Found:
    """Return the diagnoses under the program's name, where the user gave no file to keep."""
    told = [*told, *(f"A recording could not be read: {error}" for error in found.errors)]
    name = args.program.name
    diagnoses = found.diagnoses
    if args.save is None:
        diagnoses = tuple(replace(each, file=name) for each in diagnoses)
    return replace(found, diagnoses=diagnoses, differences=(*told, *found.differences))


def _check_save(path: Path) -> None:
    """Refuse, before the program runs, a file that could not be written after it."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            "A recording has to go to a file that can be written",
            given=f"{path}{': a folder' if path.is_dir() else ''}",
            remedy="choose a folder that exists and that you may write to, and a name for the file",
        )


@contextmanager
def _output_apart(apart: bool) -> Iterator[None]:
    """Send what the program prints to standard error, so that standard output holds JSON alone."""
    if not apart:
        yield
        return
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:
        # closed by the caller: there is nothing to keep apart
        yield
        return
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def _ended_by_launcher(wanted: bool) -> Iterator[None]:
    """Let SIGTERM, by which a launcher ends the other ranks when one has failed, end the program and not the report."""
    from torchweave.record.script import Interrupted

    if not wanted:
        yield
        return

    def end(*_: Any) -> None:
        raise Interrupted

    old = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        # a second one must not end the report either: the launcher waits, and kills in the end
        signal.signal(signal.SIGTERM, signal.SIG_IGN if old == signal.SIG_DFL else old)


def _without_device(words: Words, *, as_json: bool) -> int:
    """Say that there is nothing to measure, and give what the source says."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    from torchweave.record.script import Program, prepare

    # a script that is not there, or is no Python, is that first of all
    prepare(Program(words.name, words.args, words.is_module))
    print("torchweave: there is no CUDA device here, so there is nothing to measure.", file=sys.stderr)
    from torchweave.cli import check

    return check.run(
        argparse.Namespace(files=[str(_source_of(words))], json=as_json, format="text", select=None, ignore=None)
    )


def _source_of(words: Words) -> Path:
    import importlib.util

    if not words.is_module:
        path = Path(words.name)
        return path / "__main__.py" if path.is_dir() else path
    spec = importlib.util.find_spec(words.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{words.name}.__main__")
    assert spec is not None
    return Path(spec.origin or words.name)
