"""What the commands that run ranks share: sizes as options, the ranks of this machine, a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchweave.errors import TorchweaveError, UsageError
from torchweave.measure.sizes import HEAD

if TYPE_CHECKING:
    from torchweave.measure.subject import SubjectOptions

LIMIT_S = 1800.0
_COUNTS = ("ranks", "layers", "hidden", "tokens", "top_k", "rounds")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model and its link."""
    parser.add_argument("--ranks", type=int, help="local processes; default: 2, or one for each GPU")
    parser.add_argument("--layers", type=int, help="layers of the model; default: 2, on a GPU 4")
    parser.add_argument(
        "--hidden", type=int, help=f"width of a token, a multiple of {HEAD}; default: 1024, on a GPU 4096"
    )
    parser.add_argument("--tokens", type=int, help="tokens in a microbatch; default: 512, on a GPU 4096")
    parser.add_argument(
        "--link-gbps",
        type=float,
        help="speed of the simulated link, in gigabits (not bytes) a second; 0: no simulated link",
    )
    parser.add_argument(
        "--link-sms",
        type=int,
        default=1,
        help="SMs that the simulated link holds on a GPU; 1 stands for a copy engine, 8 or 32 for NCCL's channels "
        "(default: 1)",
    )


def check_sizes(args: argparse.Namespace) -> None:
    """Refuse sizes that cannot be.

    Raises:
        UsageError: It says which, and what is allowed.
    """
    for name in _COUNTS:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is at least 1", given=str(value), remedy="leave it out for the default")
    if args.hidden is not None and args.hidden % HEAD:
        raise UsageError(
            f"--hidden is a multiple of {HEAD}, the width of an attention head",
            given=str(args.hidden),
            remedy=f"--hidden {-(-args.hidden // HEAD) * HEAD}",
        )
    if args.link_gbps is not None and not 0 <= args.link_gbps < float("inf"):
        raise UsageError(
            "--link-gbps is a speed in gigabits a second",
            given=str(args.link_gbps),
            remedy="a number above 0, or 0 for no simulated link",
        )
    if args.link_sms < 1:
        raise UsageError("--link-sms is at least 1", given=str(args.link_sms), remedy="1 for a copy engine")


def subject_options(args: argparse.Namespace) -> SubjectOptions:
    """Return the model and its link that the options ask for."""
    from torchweave.measure.subject import SubjectOptions

    names = SubjectOptions.__dataclass_fields__
    return SubjectOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def words_again(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return some options as words of the command line, for the ranks."""
    words: list[str] = []
    for name in names:
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is not None:
            words += [option, str(value)]
    return words


def start_unless_launched(
    args: argparse.Namespace, command: str, names: Sequence[str], passes: Sequence[int]
) -> int | None:
    """Start this machine's ranks, unless this process is one already.

    Args:
        args: The options.
        command: The subcommand, which each rank runs again.
        names: Its options.
        passes: Exit codes with which a rank has run to its end.

    Returns:
        The exit code of all ranks, or None where this process is one of them.
    """
    try:
        from torchweave.measure import launch, training
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TorchweaveError(
            f"torchweave {command} needs torch", given="a Python without it", remedy="pip install 'torchweave[torch]'"
        ) from error
    if launch.is_launched():
        return None
    ranks = args.ranks or training.num_gpus() or 2
    return launch.start_ranks([command, *words_again(args, names)], ranks, limit_s=LIMIT_S, passes=passes)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], Any]]:
    """Show a progress bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
