"""The `torchweave` command: finds the subcommand, runs it, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from torchweave import __version__
from torchweave.cli.program import Words, cut
from torchweave.errors import TorchweaveError, UnreadableInputError, UsageError

# One module a subcommand; its docstring is its help. Each has `configure(parser)` and `run(args) -> exit code`.
COMMANDS = ("demo", "bench", "plan", "why", "check", "explain", "causes", "compare", "doctor")

EXIT_USAGE = 2
EXIT_UNREADABLE = 3
EXIT_FAILED = 4


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors leave with exit code 2, as every usage error of ours does."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="torchweave",
        description="Run the forward of one model chunk and the backward of another at once, or learn why work on a "
        "GPU does not overlap.",
    )
    parser.add_argument("--version", action="version", version=f"torchweave {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"torchweave.cli.{name}")
        doc = module.__doc__ or ""
        sub = subparsers.add_parser(
            name,
            help=doc.strip().splitlines()[0],
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(sub)
        sub.set_defaults(run=module.run, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The words after the program's name; None takes them from the process.

    Returns:
        The exit code: the subcommand's own, 2 for a usage error, 3 for unreadable input, 4 for another error
        of ours.
    """
    parser, words = build_parser(), list(sys.argv[1:] if argv is None else argv)
    program = Words(())
    if words[:1] == ["why"]:
        # what stands behind a script's name is the script's, whatever it looks like
        program = cut(parser_of(parser, "why"), words[1:])
        words = ["why", *program.own]
    args, unknown = parser.parse_known_args(words)
    args.program = program
    if unknown:
        _refuse_options(args.parser, unknown)
    if sys.stdout is None:
        # closed by the caller (`>&-`): only the exit code is wanted
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
    except UsageError as error:
        return _report(error, EXIT_USAGE)
    except UnreadableInputError as error:
        return _report(error, EXIT_UNREADABLE)
    except TorchweaveError as error:
        return _report(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader (`| head`) has gone; there is nobody left to tell
        sys.stderr.close()
        return 141
    except OSError as error:
        # what we read and write ourselves is told in our own words; this is standard output: a full disk
        with contextlib.suppress(OSError):
            sys.stdout.close()
        print(f"torchweave: standard output cannot be written: {error.strerror or error}.", file=sys.stderr)
        return EXIT_FAILED
    return code


def parser_of(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    """Return the parser of one subcommand."""
    choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found: argparse.ArgumentParser = choices[command]
    return found


def _refuse_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Leave with the subcommand's own usage, and with what was perhaps meant."""
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")


def _report(error: TorchweaveError, code: int) -> int:
    print(f"torchweave: {error}", file=sys.stderr)
    return code
