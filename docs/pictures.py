"""Make the pictures of the docs from traces of our own: `python docs/pictures.py`, from the repository's root.

It writes docs/pictures/why.svg (the report on a terminal) and docs/pictures/why.png (the HTML page, which needs
Chromium).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from torchweave.diagnose.model import Diagnosis
from torchweave.diagnose.verdicts import diagnose
from torchweave.reporting.html import write_html
from torchweave.reporting.text import report
from torchweave.trace.read import read

TRACE = Path("tests/traces/causes/item_each_step.full.json.gz")
PICTURES = Path("docs/pictures")
COLUMNS = 108
PAGE_PIXELS = (1440, 1000)


def main() -> None:
    """Make all pictures."""
    PICTURES.mkdir(exist_ok=True)
    found = diagnose(read(TRACE))
    terminal(found, PICTURES / "why.svg")
    page(found, PICTURES / "why.png")


def terminal(found: Diagnosis, path: Path) -> None:
    """Write what a terminal shows as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ torchweave why {TRACE.name}", style="bold"))
    for line in report(found, COLUMNS):
        console.print(Text(line.text, style=line.style))
    # rich's own frame would load a font from the network
    frame = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    path.write_text(console.export_svg(title="torchweave why", code_format=frame, unique_id="why"), encoding="utf-8")


def page(found: Diagnosis, path: Path) -> None:
    """Write a picture of the HTML page as PNG."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("docs/pictures.py: the page's picture needs Chromium, and none was found")
    with tempfile.TemporaryDirectory() as folder:
        write_html([found], Path(folder) / "page.html")
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
            "--virtual-time-budget=3000",
            f"--user-data-dir={folder}/profile",
            f"--window-size={PAGE_PIXELS[0]},{PAGE_PIXELS[1]}",
            f"--screenshot={path.resolve()}",
        )
        address = (Path(folder) / "page.html").as_uri()
        subprocess.run([chromium, *options, address], check=True, capture_output=True, timeout=60)


if __name__ == "__main__":
    main()
