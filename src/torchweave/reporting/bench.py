"""IDEA: the result of a benchmark as rows of text, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchweave.reporting.html import page_environment, page_source
from torchweave.reporting.output import open_output

COLUMNS = ("", "ms", "+-", "recovered", "hidden", "idle", "us a\ncrossing", "peak\nMiB", "equal")
_ALONE = (("serial", "serial"), ("compute", "compute"), ("communication", "communication"))


def table(result: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return a table's head and its rows, without columns in which there is nothing.

    Args:
        result: What `torchweave bench --json` prints.
    """
    found = _rows(result)
    shown = [at for at in range(len(COLUMNS)) if any(row[at] for row in found)]
    return tuple(COLUMNS[at] for at in shown), [tuple(row[at] for at in shown) for row in found]


def _rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    empty = ("",) * (len(COLUMNS) - 3)
    found = [(label, _ms(result[f"{key}_ms"]), _spread(result["spread"][key]), *empty) for label, key in _ALONE]
    found[0] = (*found[0][:7], _mib(result["peak_serial_mib"]), "")
    found.append(("bound", _ms(result["bound_ms"]), "", *empty))
    for name, row in result["strategies"].items():
        found.append(
            (
                name,
                _ms(row["woven_ms"]),
                _spread(row["spread"]),
                _share(row["recovered_share"]),
                _share(row["hidden_share"]),
                _share(row["idle_share"]),
                "" if row["host_us_per_crossing"] is None else f"{row['host_us_per_crossing']:.0f}",
                _mib(row["peak_mib"]),
                "bit" if row["bit_equal"] else "NO",
            )
        )
    return found


def facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what stands below the table: names and values."""
    options = ", ".join(f"{name} {value}" for name, value in result["options"].items() if value is not None)
    told = "medians, half the distance between quartiles; compute and communication: each alone"
    found = [("times", told), ("auto takes", result["auto_takes"]), ("link", result["link"]), ("sizes", options)]
    if result["limit_share"] is not None and result["limit_share"] < 1:
        found.append(("limit", f"{result['limit_share']:.2f} could be recovered beside the SMs that the link holds"))
    versions = ", ".join(f"{name} {which}" for name, which in result["versions"].items())
    return [*found, ("versions", versions), ("date", result["date"]), ("command", result["command"])]


def write_html(result: Mapping[str, Any], path: Path) -> None:
    """Write one page that needs no network.

    Args:
        result: What `torchweave bench --json` prints.
        path: Where it goes.
    """
    from markupsafe import Markup

    columns, rows = table(result)
    pages = page_environment()
    page = pages.get_template("bench.html.j2").render(
        style=Markup(page_source(pages, "report.css")),  # noqa: S704 (ours)
        columns=columns,
        rows=rows,
        facts=facts(result),
        bars=_bars(result),
        result=result,
    )
    with open_output(path) as file:
        file.write(page.encode())


def _bars(result: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Return a bar for each timing: label, time, and length as a part of the longest."""
    times = [(label, float(result[f"{key}_ms"])) for label, key in _ALONE]
    times += [(f"woven by {name}", float(row["woven_ms"])) for name, row in result["strategies"].items()]
    longest = max(ms for _, ms in times) or 1.0
    return [(label, _ms(ms), ms / longest) for label, ms in times]


def _ms(value: float) -> str:
    return f"{value:.2f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _spread(quartiles: tuple[float, float]) -> str:
    """Return half the distance between the quartiles."""
    return f"{(quartiles[1] - quartiles[0]) / 2:.2f}"
