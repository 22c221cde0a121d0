"""Runs a program in this process as `__main__`, as `python SCRIPT` and `python -m MODULE` do."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from torchweave.errors import UnreadableInputError


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be run.

    Attributes:
        name: The script's path or the module's name.
        args: The words after it.
        is_module: True for `-m`.
    """

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended.

    Attributes:
        code: Its exit code, as the shell would see it.
        error: The exception in one line, empty where there was none.
        interrupted: Whether Ctrl-C, or the launcher, ended it.
    """

    code: int = 0
    error: str = ""
    interrupted: bool = False


class Interrupted(KeyboardInterrupt):
    """The launcher asked the process to end (SIGTERM)."""


def prepare(program: Program) -> Callable[[], Ending]:
    """Find and compile a program.

    Args:
        program: The program.

    Returns:
        Runs it. What it raises is shown as Python shows it, without our frames.

    Raises:
        UnreadableInputError: There is none of that name, or it is no Python.
    """
    if program.is_module:
        # a module of the current folder is found as `python -m` finds it
        with _first_on_path(str(Path.cwd())):
            found, code = _module(program.name)
        spec: ModuleSpec | None = found
        file, folder = found.origin or program.name, str(Path.cwd())
    else:
        path = _script(program.name)
        # a folder is run as the module `__main__` that lies in it
        spec = PathFinder.find_spec("__main__", [str(path.absolute())]) if path.is_dir() else None
        source = (path / "__main__.py" if path.is_dir() else path).absolute()
        code, file = _compiled(source, program.name), str(source)
        folder = str(path.absolute() if path.is_dir() else path.resolve().parent)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins, __spec__=spec, __cached__=None, __annotations__={})
    main.__loader__ = spec.loader if spec is not None else None
    main.__package__ = spec.parent if spec is not None else None
    return lambda: _run(code, main, [file if program.is_module else program.name, *program.args], folder)


def _run(code: CodeType, main: ModuleType, words: list[str], folder: str) -> Ending:
    with _as_main(main, words), _first_on_path(folder):
        try:
            try:
                exec(code, main.__dict__)  # noqa: S102 (running it is what was asked for)
            finally:
                _wait_for_threads()
        except SystemExit as end:
            return Ending(_exit_code(end))
        except KeyboardInterrupt as end:
            why = "ended by its launcher (SIGTERM)" if isinstance(end, Interrupted) else "interrupted (Ctrl-C)"
            return Ending(130, why, interrupted=True)
        except BaseException as error:
            _show(error)
            return Ending(1, traceback.format_exception_only(type(error), error)[-1].strip())
        finally:
            _flush()
    return Ending()


def _wait_for_threads() -> None:
    """Wait for the program's threads as Python does at its end, but for those that idle in pools until then."""
    pools = sys.modules.get("concurrent.futures.thread")
    idle = set(getattr(pools, "_threads_queues", ()))
    own = threading.current_thread()
    while True:
        running = [one for one in threading.enumerate() if one is not own and not one.daemon and one not in idle]
        if not running:
            return
        running[0].join()


def _script(name: str) -> Path:
    path = Path(name)
    if path.is_dir() and (path / "__main__.py").is_file():
        return path
    if not path.is_file():
        raise UnreadableInputError(
            "A script has to be a file that can be read",
            given=f"{name}: {'a folder without __main__.py' if path.is_dir() else 'no such file'}",
            remedy="check the path; `-m MODULE` runs a module by its name",
        )
    return path


def _compiled(path: Path, name: str) -> CodeType:
    try:
        with io.open_code(str(path)) as source:
            return compile(source.read(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        given = f"{name}: {error.strerror or error}"
        raise UnreadableInputError(
            "A script has to be a file that can be read", given=given, remedy="check its permissions"
        ) from error
    except (RecursionError, MemoryError) as error:
        raise UnreadableInputError(
            "A script has to be Python", given=f"{name}: nested too deeply for Python's parser", remedy="mend it"
        ) from error
    except (SyntaxError, ValueError) as error:
        at = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UnreadableInputError(
            "A script has to be Python", given=f"{name}{at}: {what}", remedy="mend it, and run it with `python` first"
        ) from error


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return what `python -m NAME` would run: the module, or the package's `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError) as error:
        raise _no_module(name, str(error)) from error
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is None or get_code is None:
        raise _no_module(name, "there is none of that name, or it has no `__main__`")
    try:
        code = get_code(spec.name)
    except (RecursionError, MemoryError) as error:
        raise _no_module(name, "it is nested too deeply for Python's parser") from error
    except (ImportError, SyntaxError, ValueError) as error:
        raise _no_module(name, str(error)) from error
    if code is None:
        raise _no_module(name, "it is not written in Python")
    return spec, code


def _no_module(name: str, what: str) -> UnreadableInputError:
    return UnreadableInputError(
        "A module has to be one that `python -m` can run",
        given=f"`{name}`: {what}",
        remedy="check its name and sys.path",
    )


@contextmanager
def _as_main(main: ModuleType, words: list[str]) -> Iterator[None]:
    """Let a module be `__main__`, with its words; it stays so where somebody still needs it by name."""
    old_main, old_words = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = main, words
    try:
        yield
    finally:
        sys.argv = old_words
        sys.modules["__main__"] = old_main


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    """Let a folder be first where modules are looked for, instead of the command's own."""
    old = list(sys.path)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # what the program itself added stays
        if folder in sys.path and folder not in old:
            sys.path.remove(folder)


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)  # noqa: T201 (as Python does)
    return 1


def _show(error: BaseException) -> None:
    """Show an exception by the program's own hook, without our frames."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.excepthook(type(error), error, trace)


def _is_ours(trace: TracebackType) -> bool:
    return os.path.abspath(trace.tb_frame.f_code.co_filename) == os.path.abspath(__file__)  # noqa: PTH100


def _flush() -> None:
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        if stream is not None and not stream.closed:
            stream.flush()


def as_words(program: Program) -> Sequence[str]:
    """Return a program as it is written on a command line."""
    return (*(("-m",) if program.is_module else ()), program.name, *program.args)
