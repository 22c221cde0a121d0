"""Say why work on CUDA streams did not overlap, from traces.

Give one trace (Kineto Chrome JSON, plain or gzip, or an Nsight Systems .sqlite export), several, or a folder of
ranks. Exit code: 0 where the work overlapped or nothing could, 1 where overlap was lost, 2 for a wrong option,
3 for a file that cannot be read.
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
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a trace, several, or a folder of ranks")
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


def run(args: argparse.Namespace) -> int:
    """Run `torchweave why`."""
    from torchweave.cli.output import show, write
    from torchweave.diagnose.ranks import diagnose_files

    if args.svg is not None and not args.pipeline:
        raise UsageError("`--svg` draws a pipeline step", given="it alone", remedy="add `--pipeline`")
    window = parse_window(args.window)
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
    endings = (".json", ".json.gz", ".sqlite")
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
