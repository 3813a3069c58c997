"""The published tables are those of the published numbers."""

from __future__ import annotations

import runpy

from tests.training import REPOSITORY


def test_results_tables_are_current():
    render = runpy.run_path(str(REPOSITORY / "benchmarks" / "render_results.py"))["render"]
    assert (REPOSITORY / "docs" / "results" / "README.md").read_text() == render(), (
        "run `python benchmarks/render_results.py > docs/results/README.md`"
    )
