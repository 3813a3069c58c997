"""Where commands print tables."""

from __future__ import annotations

import sys

from rich.console import Console

FILE_WIDTH = 160
"""Columns of what goes into a file or a pipe, which rich would cut to 80."""


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
