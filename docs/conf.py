"""Settings of the documentation: Markdown through MyST, and the docstrings of the public names."""

from importlib.metadata import version as version_of

project = "torchweave"
author = "The torchweave developers"
copyright = "The torchweave developers"
version = release = version_of("torchweave")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

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
