"""How Sphinx builds these pages: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import lowtide

project = "lowtide"
author = "the lowtide authors"
release = version = lowtide.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "commands"]
exclude_patterns = ["_build", "_ext"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write names as `name`

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

smartquotes = False  # `--mode` is no dash

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = f"lowtide {release}"
html_show_sourcelink = False
html_show_copyright = False
