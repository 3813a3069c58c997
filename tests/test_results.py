"""The published tables are those of the published numbers."""

from __future__ import annotations

import runpy

from tests.training import REPOSITORY


def test_tables_are_current():
    module = runpy.run_path(str(REPOSITORY / "benchmarks" / "render_results.py"))
    remedy = "run `python benchmarks/render_results.py`"
    assert (REPOSITORY / "docs" / "results" / "README.md").read_text() == module["render"](), remedy
    readme = (REPOSITORY / "README.md").read_text()
    assert readme == module["with_headline"](readme), remedy
