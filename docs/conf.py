"""Settings of the documentation: Markdown through MyST, and the docstrings of the public names."""

from importlib.metadata import version as version_of
from pathlib import Path

project = "torchweave"
author = "The torchweave developers"
copyright = "The torchweave developers"
version = release = version_of("torchweave")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "check_rules.md"]

myst_enable_extensions = ["deflist"]
# headings can be linked to from other pages
myst_heading_anchors = 3

# The docstrings have a section of their own that says where a formula or a claim came from.
napoleon_custom_sections = ["Source"]
autodoc_typehints = "none"
# the docstrings write code between single backticks, as Markdown does
default_role = "literal"
autodoc_member_order = "bysource"

html_theme = "alabaster"
html_theme_options = {"description": "Forward and backward at once, or why not", "fixed_sidebar": True}


def write_causes(_: object) -> None:
    """Write the page of causes from their docstrings: a rule's documentation lives on the rule."""
    from torchweave.diagnose.causes import NAMES, cause

    parts = ["# Causes\n", "Every name that `torchweave why` gives, as `torchweave explain` prints it.\n"]
    for name in NAMES:
        about = cause(name)
        parts.append(f"## {name}\n\n{about.page.strip()}\n")
        if about.mend:
            parts.append(f"```text\n{about.mend.rstrip()}\n```\n")
    (Path(__file__).parent / "causes.md").write_text("\n".join(parts))


def write_rules(_: object) -> None:
    """Write the rules of `torchweave check` from their docstrings, as a part of its page."""
    from torchweave.source.rules import all_rules

    parts = [f"### {rule.cause}\n\n{rule.page}\n" for rule in all_rules()]
    (Path(__file__).parent / "check_rules.md").write_text("\n".join(parts))


def setup(app: object) -> None:
    app.connect("builder-inited", write_causes)  # type: ignore[attr-defined]
    app.connect("builder-inited", write_rules)  # type: ignore[attr-defined]
