"""The words of `torchweave why`: which are its own, and which belong to the program that it is to run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

_ENDINGS = (".py", ".pyw")


@dataclass(frozen=True, slots=True)
class Words:
    """A command line, cut in two.

    Attributes:
        own: The command's own words.
        name: The script's path or the module's name, empty where no program is to be run.
        args: The program's own words.
        is_module: True for `-m`.
    """

    own: tuple[str, ...]
    name: str = ""
    args: tuple[str, ...] = ()
    is_module: bool = False


def cut(parser: argparse.ArgumentParser, words: Sequence[str]) -> Words:
    """Cut a command line at the program that it names: everything behind that belongs to the program.

    A program is the first word that is no option and ends in .py (or is a folder with a `__main__.py`), or what
    follows `-m`. A first `--` behind it is left out.

    Args:
        parser: Knows which options take values.
        words: The words after the command.
    """
    at = 0
    while at < len(words):
        word = words[at]
        if word == "-m" and at + 1 < len(words):
            return Words(tuple(words[:at]), words[at + 1], _without_dashes(words[at + 2 :]), is_module=True)
        if word.startswith("-m") and len(word) > 2 and not word.startswith("--"):
            return Words(tuple(words[:at]), word[2:], _without_dashes(words[at + 1 :]), is_module=True)
        if word == "--" and at + 1 < len(words) and is_program(words[at + 1]):
            return Words(tuple(words[:at]), words[at + 1], _without_dashes(words[at + 2 :]))
        if not word.startswith("-"):
            if is_program(word):
                return Words(tuple(words[:at]), word, _without_dashes(words[at + 1 :]))
            # traces: everything is the command's own
            return Words(tuple(words))
        at += 1 + _num_values(parser, word)
    return Words(tuple(words))


def is_program(word: str) -> bool:
    """Return whether a word names a script, and not a trace."""
    # unlike pathlib's, this one says no to what can be no path at all
    return word.endswith(_ENDINGS) or os.path.isfile(os.path.join(word, "__main__.py"))  # noqa: PTH113, PTH118


def _without_dashes(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(words[1:] if words[:1] == ["--"] or words[:1] == ("--",) else words)


def _num_values(parser: argparse.ArgumentParser, word: str) -> int:
    """Return how many words after an option are its values."""
    name, equals, _ = word.partition("=")
    if equals:
        return 0
    options = parser._option_string_actions
    # argparse takes unique beginnings of options too
    found = options.get(name) or next((options[key] for key in options if key.startswith(name) and len(name) > 2), None)
    if found is None or found.nargs == 0:
        return 0
    return found.nargs if isinstance(found.nargs, int) else 1
