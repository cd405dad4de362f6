"""The site of the documents: `python -m sphinx -W -q -b html docs build/docs`.

Pages of the command line, settings, methods and index kinds are generated from the code into
docs/reference, which git ignores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

from generated import write_reference  # noqa: E402

project = "hybrid_kv"
author = "the authors of hybrid_kv"
html_theme = "furo"
html_title = "hybrid_kv"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["archive"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]  # pages of methods begin below the level of their list

write_reference(DOCS / "reference")


def flatten_settings(app: Any, what: str, name: str, item: Any, options: Any, lines: Any) -> None:
    """Take the indentation out of docstrings of settings, which list `name: meaning` in prose."""
    if isinstance(item, type) and issubclass(item, BaseModel):
        lines[:] = [line.strip() for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", flatten_settings, priority=400)  # before napoleon
