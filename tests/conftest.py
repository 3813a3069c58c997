from __future__ import annotations

import pytest

from tests import poison as poisoning
from titan_megamoe import data
from titan_megamoe.integration import compat

compat.install()  # before any test imports TorchTitan


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A small offline corpus and tokenizer."""
    folder = tmp_path_factory.mktemp("assets") / "python_docs"
    data.build(folder, max_mb=2)
    return folder


def pytest_addoption(parser):
    parser.addoption(
        "--poison", action="store_true", help="fill memory with NaN before it is written (tests/poison.py)"
    )


@pytest.fixture
def poison(monkeypatch):
    """All memory that is not written yet holds NaN during a test, in the processes that it starts, too."""
    monkeypatch.setenv(poisoning.VARIABLE, "1")
    undo = poisoning.install()
    yield
    undo()


@pytest.fixture(autouse=True)
def _poison_if_asked(request):
    if request.config.getoption("--poison"):
        request.getfixturevalue("poison")
