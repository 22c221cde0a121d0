"""Say what in the source prevents overlap, is a race, or is measured wrongly.

Reads Python files, folders and notebooks, and never runs them; needs no torch and no GPU. A line with the comment
`# torchweave: ignore[cause]` is left alone; [tool.torchweave] in pyproject.toml chooses causes and files. Exit code: 0
where nothing was found, 1 where something was, 2 for a wrong option or setting, 3 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from torchweave.errors import UnreadableInputError
from torchweave.source import Finding
from torchweave.source.settings import Settings

EXIT_FOUND, EXIT_UNREADABLE = 1, 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torchweave check`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a Python file, a notebook, or a folder of them")
    look = parser.add_mutually_exclusive_group()
    look.add_argument("--json", action="store_true", help="print the findings as JSON")
    look.add_argument("--format", choices=("text", "github"), default="text", help="text, or GitHub's annotations")
    parser.add_argument("--select", metavar="CAUSE", action="append", help="look for this cause alone; may be repeated")
    parser.add_argument(
        "--ignore", metavar="CAUSE", action="append", help="do not look for this cause; may be repeated"
    )


@dataclass(slots=True)
class _Result:
    """What was found in all files."""

    findings: list[Finding] = field(default_factory=list)
    code: dict[tuple[str, int], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_files: int = 0
    unreadable: bool = False


def run(args: argparse.Namespace) -> int:
    """Run `torchweave check`."""
    from torchweave.source.files import find, identity

    result, seen = _Result(), set()
    choose = _Choice(args.select, args.ignore)
    for word in args.files:
        settings = choose.settings(Path(word))
        try:
            for file in find(word, settings.excludes):
                if identity(file) not in seen:
                    seen.add(identity(file))
                    _check(file, choose.settings(file), result)
        except UnreadableInputError as error:
            _tell(result, error)
    _print(result, args)
    if result.unreadable:
        return EXIT_UNREADABLE
    return EXIT_FOUND if result.findings else 0


class _Choice:
    """The settings of each file's folder, read once, with the command line's choice on top."""

    def __init__(self, selected: list[str] | None, ignored: list[str] | None) -> None:
        from torchweave.source.rules import NAMES
        from torchweave.source.settings import chosen

        self._selected = chosen(selected or NAMES, ignored or [], where="command line")
        self._given = selected is not None
        self._by_folder: dict[Path, Settings] = {}

    def settings(self, path: Path) -> Settings:
        """Return the settings of a file or folder."""
        from torchweave.source.settings import settings_for

        folder = path if path.is_dir() else path.parent
        if folder not in self._by_folder:
            found = settings_for(folder)
            causes = self._selected if self._given else found.causes & self._selected
            self._by_folder[folder] = Settings(causes, found.exclude, found.folder)
        return self._by_folder[folder]


def _check(file: Path, settings: Settings, result: _Result) -> None:
    from torchweave.source.check import check_program
    from torchweave.source.files import read

    try:
        program = read(file)
        found = check_program(program, causes=settings.causes)
    except UnreadableInputError as error:
        _tell(result, error)
        return
    result.num_files += 1
    result.findings += found.findings
    if found.findings:
        code = {program.place(line): text for line, text in enumerate(program.text.split("\n"), 1)}
        result.code.update({(one.file, one.line): code[one.file, one.line] for one in found.findings})
    for line, what in found.idle_comments:
        name, inside = program.place(line)
        result.notes.append(f"{name}:{inside}: {what}")


def _tell(result: _Result, error: UnreadableInputError) -> None:
    result.unreadable = True
    print(f"torchweave: {error}", file=sys.stderr)


def _print(result: _Result, args: argparse.Namespace) -> None:
    from torchweave.reporting import findings as looks

    for note in result.notes:
        print(f"torchweave: {note}", file=sys.stderr)
    if args.json:
        sys.stdout.write(looks.to_json(result.findings))
    elif args.format == "github":
        sys.stdout.write(looks.to_github(result.findings))
    elif result.num_files:
        from torchweave.cli.output import print_lines, width
        from torchweave.reporting.lines import Line

        number = len(result.findings)
        files = "1 file" if result.num_files == 1 else f"{result.num_files} files"
        summary = (
            f"{number} finding{'s' if number != 1 else ''} in {files}." if number else f"Nothing found in {files}."
        )
        print_lines([*looks.to_text(result.findings, result.code, width()), Line(summary, "bold")])
