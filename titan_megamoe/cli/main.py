"""``titan-megamoe COMMAND ...``. Each command is a module of this package with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

COMMANDS = {
    "compare": "train one configuration with several strategies: which is faster, by how much, and do the losses agree",
    "doctor": "what this machine has, and which strategies and precisions work on it",
    "plan": "memory, NVLink bytes and arithmetic of a configuration, before a launch",
}


def make_parser(command: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"titan-megamoe {command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 if the command's answer is yes, 1 if it is no, 2 for bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        lines = [__doc__, "", *(f"  {name:<9} {summary}" for name, summary in COMMANDS.items())]
        lines += ["", "titan-megamoe COMMAND --help says more. To train: torchrun -m titan_megamoe.train --help"]
        asked = bool(argv) and argv[0] in ("-h", "--help")
        print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
        if argv and not asked:
            print(f"\ntitan-megamoe: '{argv[0]}' is not one of: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 0 if asked else 2
    command, *rest = argv
    module = importlib.import_module(f".{command}", __package__)
    parser = make_parser(command, module)
    arguments, overrides = parser.parse_known_args(rest)
    if getattr(module, "TAKES_OVERRIDES", False):
        arguments.overrides = [word for word in overrides if word != "--"]
    elif overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return module.run(arguments)
    except ValueError as error:
        print(f"titan-megamoe {command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
