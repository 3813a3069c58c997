"""The documentation: every command in it is executed by a test, every link leads somewhere."""

from __future__ import annotations

import re

import pytest

from tests.training import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

EXECUTED_BY = {
    r"\./run_train\.sh$": "tests/test_end_to_end.py::test_run_script_trains_and_a_second_call_resumes",
    r"NGPU=2 (CONFIG_FILE=\S+ )?\./run_train\.sh ": "tests/test_end_to_end.py::test_run_script_trains_and_a_second_call_resumes",
    r"\./run_tests\.sh$": ".ci/run",
    r"\./run_tests\.sh --poison ": "tests/test_poison.py",
    r"python -m titan_megamoe\.bench\.soak ": "tests/test_soak.py::test_a_killed_run_resumes_from_the_last_complete_checkpoint",
    r"torchrun --nproc_per_node=\d+ -m titan_megamoe\.train --config ": "tests/test_end_to_end.py::test_run_script_trains_and_a_second_call_resumes",
    r"torchrun .* -m torchtitan\.train .*overrides\.mega_moe": "tests/test_end_to_end.py::test_stock_torchtitan_runs_our_override",
    r"(\./)?titan-megamoe compare ": "tests/test_compare.py::test_end_to_end",
    r"(\./)?titan-megamoe doctor": "tests/test_doctor.py",
    r"\./titan-megamoe plan ": "tests/test_end_to_end.py::test_the_command_from_a_checkout",
    r"titan-megamoe plan ": "tests/test_plan_command.py",
    r"pip install -e \.": ".ci/run",  # by scripts/environment.sh
}
"""What commands look like, and the test that runs them: with the same words, but fewer steps and other folders."""


def commands(page) -> list[str]:
    """The lines of a page's bash blocks, continued ones joined, comments dropped."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        stripped = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
        found += [re.sub(r"\s+", " ", line) for line in stripped if line]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_executed_by_a_test(page):
    for command in commands(page):
        tests = [test for pattern, test in EXECUTED_BY.items() if re.match(pattern, command)]
        assert tests, f"{page.name}: no test is named for `{command}`"
        file, _, name = tests[0].partition("::")
        assert f"def {name}" in (REPOSITORY / file).read_text() if name else (REPOSITORY / file).exists(), tests[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_commands_name_exist(page):
    for command in commands(page):
        for word in re.findall(r"(?:--config |CONFIG_FILE=)(\S+\.toml)", command):
            assert (REPOSITORY / word).is_file(), command


def heading_anchors(page) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in heading_anchors(linked), f"{page.name}: {target}"
