"""How `make docs` builds the site: Sphinx over the Markdown of docs/, specs/ and benchmarks/, without a network.

The source folder is the repository, so that a link from one page to a file beside it is the same link here and in a
checkout. The API reference is read from docstrings; the tables that follow from code are written by `make docs-tables`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from swift_vlpack import __version__  # noqa: E402 - the checkout's, not an installed one

project = "swift_vlpack"
version = release = __version__
root_doc = "docs/index"
include_patterns = ["docs/**", "specs/*.md", "benchmarks/*.md", "CHANGELOG.md", "SECURITY.md"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "demo_output",
    "tests",
    "swift_vlpack",
    "docs/_static",
    "docs/_site",
    "docs/_package",
]

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # the changelog begins its versions where its format says

default_role = "code"  # docstrings have `names` in single backticks
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"swift_vlpack {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_site"]  # index.html at the top, which leads to docs/
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}


def without_aliases(app: Any, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Python says of a field of a named tuple which number it has, and nothing else."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def reachable_tables(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Let a table that is wider than the page be scrolled by keyboard, and its headings say that they are."""
    body = context.get("body", "")
    body = body.replace(
        '<div class="table-wrapper', '<div tabindex="0" role="region" aria-label="table" class="table-wrapper'
    )
    context["body"] = body.replace('<th class="head', '<th scope="col" class="head')


def setup(app: Any) -> None:
    """Connect what this site has of its own; Sphinx calls it."""
    app.connect("autodoc-process-docstring", without_aliases)
    app.connect("html-page-context", reachable_tables, priority=900)  # after the theme, which wraps the tables
