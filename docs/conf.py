"""How Sphinx builds the site: make docs."""

import importlib.metadata
import sys
from pathlib import Path

import matplotlib

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks")]

from site_pages import benchmark_pages, reference_pages, zoo_page  # noqa: E402 - it stands beside this file

matplotlib.use("Agg")

project = "penstock"
author = "The penstock developers"
project_copyright = "the penstock developers"
release = importlib.metadata.version("penstock")

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = [
    "_build",
    "_templates",
    "generated/benchmarks.md",
    "generated/command-line.md",
    "generated/schema.md",
    "generated/zoo.md",
]
templates_path = ["_templates"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Blocks of pages that name no language are commands and what they print.
highlight_language = "text"

# Types in signatures are told in words by the docstrings; with annotations every alias of NumPy would be a link to nowhere.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autosummary_generate = True
autosummary_imported_members = False
numpydoc_show_class_members = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "generated/gallery",
    "filename_pattern": r"plot_",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,  # a table of times belongs to no page
    "within_subsection_order": "FileNameSortKey",
}

html_theme = "pydata_sphinx_theme"
html_title = "penstock"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "benchmarks": []}


def setup(app):
    """Write the pages that are made from the code and from the records, before Sphinx looks for pages."""
    generated = DOCS / "generated"
    app.connect("config-inited", lambda app, config: reference_pages.write(generated))
    app.connect("config-inited", lambda app, config: benchmark_pages.write(generated))
    app.connect("config-inited", lambda app, config: zoo_page.write(generated))
