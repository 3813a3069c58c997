from __future__ import annotations

import pytest

from titan_megamoe import data
from titan_megamoe.integration import compat

compat.install()  # before any test imports TorchTitan


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A small offline corpus and tokenizer."""
    folder = tmp_path_factory.mktemp("assets") / "python_docs"
    data.build(folder, max_mb=2)
    return folder
