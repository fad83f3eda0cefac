"""Configuration of Sphinx for the site; `build.py` runs it."""

from __future__ import annotations

import inspect
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import turnwright
from contrib.docs_site.staging import repository_address

HERE = Path(__file__).parent

project = "Turnwright"
copyright = "the Turnwright authors"
version = release = turnwright.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

# Pages are written for a code forge: headings have its anchors, and nothing else is markup.
myst_heading_anchors = 6
myst_enable_extensions: list[str] = []

# A word in single backticks of a docstring is a link where it names something, else code.
default_role = "py:obj"
smartquotes = False  # what is written is what a program prints
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 70
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "Turnwright"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = ["from_disk.js", "tables.js", "find_error.js"]
html_show_sourcelink = False
html_copy_source = False
html_domain_indices = False  # the one of names has all
html_show_sphinx = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "use_edit_page_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "icon_links": [
        {"name": "Source", "url": address, "icon": "fa-solid fa-code"}
        for address in [repository_address()]
        if address
    ],
}
html_sidebars = {"index": []}


def read_sections(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Read `Args:` and `Raises:` of a docstring. The extension napoleon also takes what is before a
    colon for the type of a field, which it is not here."""
    if what == "function":  # what `help` shows, also of one that another function's is made of
        lines[:] = (inspect.getdoc(value) or "").splitlines()
    if what in ("class", "exception", "function", "method"):
        lines[:] = GoogleDocstring(lines, SECTIONS).lines()


SECTIONS = Config(napoleon_use_rtype=False)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_sections)
