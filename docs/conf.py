"""Sphinx configuration: `make docs` builds the site, with every warning an error."""

from zerostep import __version__

project = "zerostep"
author = "The zerostep authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["pictures"]

html_theme = "furo"
html_title = f"zerostep {release}"
html_copy_source = False

# Headings can be linked to, as in a repository browser: page.md#the-heading.
myst_heading_anchors = 3

# Docstrings put code between single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

# `-n` checks every reference. Types of other projects, and types that are not public, have no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|contextlib|pathlib|typing|os)\..*"),
    ("py:.*", r"zerostep\.[a-z_]+\..*"),
]
