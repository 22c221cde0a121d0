"""Say why work on CUDA streams did not overlap, from a run or from traces.

Give a script (SCRIPT.py ARGS, or -m MODULE ARGS), and it is run here and watched; everything behind its name is its
own. Or give one trace (Kineto Chrome JSON, plain or gzip, an Nsight Systems .sqlite export, or a recording that --save
kept), several, or a folder of ranks. Exit code: 0 where the work overlapped or nothing could, 1 where overlap was
lost, 2 for a wrong option, 3 for a file that cannot be read; a script that fails leaves with its own code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchweave.errors import UnreadableInputError, UsageError
from torchweave.trace.given import is_folder, is_pipe, unreadable

EXIT_LOST, EXIT_UNREADABLE = 1, 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave why`."""
    parser.add_argument(
        "traces", nargs="*", metavar="TRACE | SCRIPT.py [ARGS]", help="a trace, several, a folder of ranks, or a script"
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script; its options follow")
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one HTML page, which needs no network")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write the trace with the diagnosis as tracks for Perfetto"
    )
    parser.add_argument(
        "--between",
        nargs=2,
        metavar=("A", "B"),
        help="the two sides: forward, backward, compute, communication, copies, stream:N, range:NAME",
    )
    parser.add_argument("--window", metavar="A..B", help="only this time, in ms after the first device work")
    parser.add_argument(
        "--pipeline", action="store_true", help="show one pipeline step of all ranks with its bubbles; no diagnosis"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --pipeline: also draw it")
    parser.add_argument("--range", dest="range_name", metavar="NAME", help="only work of this user annotation")
    parser.add_argument("--skip", type=int, metavar="N", help="script: steps to leave out (default: until they settle)")
    parser.add_argument("--steps", type=int, metavar="N", help="script: steps to watch (default: 2)")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="script: keep the recording (a folder, where there are several ranks)"
    )


def run(args: argparse.Namespace) -> int:
    """Run `torchweave why`."""
    from torchweave.cli.output import show, write
    from torchweave.diagnose.ranks import diagnose_files

    if args.svg is not None and not args.pipeline:
        raise UsageError("`--svg` draws a pipeline step", given="it alone", remedy="add `--pipeline`")
    window = parse_window(args.window)
    if args.program.name:
        from torchweave.cli.live import run_program

        if args.pipeline:
            raise UsageError("`--pipeline` takes traces", given=args.program.name, remedy="give a folder of ranks")

        _check_steps(args)
        return run_program(args, args.program)
    _refuse_steps(args)
    _refuse_notebooks(args.traces)
    files = find_traces(args.traces)
    if args.pipeline:
        _refuse_beside_pipeline(args)
        from torchweave.cli import pipeline_picture

        pipeline_picture.show(files, as_json=args.json, svg=args.svg)
        return 0
    if args.perfetto and (len(files) > 1 or is_pipe(files[0])):
        given = f"{len(files)} traces" if len(files) > 1 else f"{files[0]}, a pipe"
        raise UsageError("`--perfetto` takes one trace, in a file", given=given, remedy="give one file")
    together = len(args.traces) == 1 and is_folder(Path(args.traces[0]))
    found = diagnose_files(files, between=args.between, window_ms=window, range_name=args.range_name, one_job=together)
    for error in found.errors:
        if len(files) == 1:
            raise error
        print(f"torchweave: {error}", file=sys.stderr)
    if found.skipped:
        print(f"torchweave: no traces, skipped: {', '.join(found.skipped)}", file=sys.stderr)
    if not found.diagnoses:
        return EXIT_UNREADABLE
    write(found, files[0], html=args.html, perfetto=args.perfetto)
    show(found, as_json=args.json, as_list=len(files) > 1 or together)
    if found.errors:
        return EXIT_UNREADABLE
    lost = any(diagnosis.verdict not in ("overlapped", "nothing_to_overlap") for diagnosis in found.diagnoses)
    return EXIT_LOST if lost else 0


def _check_steps(args: argparse.Namespace) -> None:
    if args.traces:
        given = " ".join(args.traces)
        raise UsageError("A script and traces are two questions", given=given, remedy="ask one after the other")
    for name, least in (("skip", 0), ("steps", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"`--{name}` is a whole number from {least}", given=str(value))


def _refuse_steps(args: argparse.Namespace) -> None:
    """Refuse what only a script can have where there is none."""
    given = [f"--{name}" for name in ("skip", "steps", "save") if getattr(args, name) is not None]
    if args.module is not None or not args.traces:
        raise UsageError(
            "`torchweave why` needs a trace or a script",
            given="`-m` without a module" if args.module is not None else "neither",
            remedy="give a trace, SCRIPT.py, or -m MODULE",
        )
    if given:
        raise UsageError(
            f"{', '.join(given)} goes with a script that is run",
            given=" ".join(args.traces),
            remedy="give SCRIPT.py or -m MODULE; a part of a trace is chosen by `--window` or `--range`",
        )


def _refuse_notebooks(paths: list[str]) -> None:
    for path in paths:
        if path.endswith(".ipynb"):
            raise UsageError(
                "`torchweave why` runs scripts and reads traces",
                given=f"{path}, a notebook",
                remedy="write `with torchweave.watch() as w:` in its cells, or read it by `torchweave check`",
            )


def _refuse_beside_pipeline(args: argparse.Namespace) -> None:
    """Refuse what belongs to a diagnosis, which `--pipeline` does not make."""
    for option, name in (("html",) * 2, ("perfetto",) * 2, ("between",) * 2, ("window",) * 2, ("range", "range_name")):
        if getattr(args, name) is not None:
            raise UsageError(
                f"`--{option}` belongs to a diagnosis", given="`--pipeline` beside it", remedy="run the two one by one"
            )


def parse_window(text: str | None) -> tuple[float, float] | None:
    """Return begin and end of `A..B`; an empty end is the trace's own.

    Raises:
        UsageError: It is not two numbers, or the end is not after the begin.
    """
    if text is None:
        return None
    begin, dots, end = text.partition("..")
    try:
        window = (float(begin) if begin else 0.0, float(end) if end else 1e9)
    except ValueError:
        window = (0.0, 0.0)
    if dots and window[1] <= window[0] and (begin, end) != ("", "") and window != (0.0, 0.0):
        raise UsageError("A window has to end after its begin", given=f"`{text}`", remedy="give begin..end, in ms")
    # written so that NaN is refused as well
    if not dots or not window[0] < window[1] <= 1e9:
        raise UsageError(
            "A window is two times in ms with two dots between them",
            given=f"`{text}`",
            remedy="write it like `10..25.5`; `10..` goes to the end",
        )
    return window


def find_traces(paths: list[str]) -> list[Path]:
    """Return the files that paths mean: a folder means all traces in it, by name.

    Raises:
        UnreadableInputError: A folder holds none.
    """
    endings = (".json", ".json.gz", ".sqlite", ".twr")
    files: list[Path] = []
    for path in map(Path, paths):
        if not is_folder(path):
            files.append(path)
            continue
        try:
            inside = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(endings))
        except OSError as error:
            raise unreadable(path, error) from error
        if not inside:
            raise UnreadableInputError(
                "A folder of ranks has to hold traces",
                given=f"{path}: no file that ends in {', '.join(endings)}",
                remedy="give the folder that the traces of all ranks were exported to, or the files one by one",
            )
        files += inside
    return files
