"""Entry points of load tests: their options, progress output, and final line."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any


def options(doc: str | None, **declared: Any) -> argparse.ArgumentParser:
    """Return the parser of an entry.

    Args:
        doc: The entry's description.
        declared: Default of each option, or its type where it has none, by name; with its help
            behind it in a tuple. False is of a flag, a list of an option with several values.
    """
    entry = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(
        prog=f"python -m {entry.name.removesuffix('.__main__')}" if entry else None,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value in declared.items():
        default, about = value if isinstance(value, tuple) else (value, None)
        more: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            more = {"action": "store_true"}
        elif isinstance(default, list):
            more = {"default": default, "nargs": "+", "type": type(default[0])}
        elif isinstance(default, type):
            more = {"type": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=about, **more)
    return parser


def arms_of(
    parser: argparse.ArgumentParser,
    names: str,
    arms: Collection[str],
    parts: Mapping[str, tuple[str, ...]] = {},
) -> list[str]:
    """Return the arms that are named with commas; `parts`: names of several arms."""
    found = [part for arm in names.split(",") for part in parts.get(arm, (arm,))]
    if unknown := set(found) - set(arms):
        parser.error(f"there is no arm {', '.join(sorted(unknown))}; there are {', '.join(arms)}")
    return found


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures with each object inside replaced by its entries, named `outer_inner`.

    Raises:
        ValueError: Two figures would get the same name.
    """
    found: dict[str, Any] = {}
    for name, value in figures.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        for key, figure in inner.items():
            whole = f"{name}_{key}" if key else name
            if whole in found:
                raise ValueError(f"two figures are called {whole}")
            found[whole] = figure
    return found


def report(figures: Mapping[str, Any]) -> None:
    """Print the figures as the last line: one flat JSON object.

    `valid` and the like come first. Those that are 0 are also named on stderr.
    """
    found = flat(figures)
    checks = {key: found[key] for key in found if {"valid", "invalid"} & set(key.split("_"))}
    if invalid := [key for key, value in checks.items() if value == 0]:
        print_progress(f"INVALID, see host_cores and late_share: {', '.join(invalid)}")
    print(json.dumps(checks | found), flush=True)


def parts_of(
    parser: argparse.ArgumentParser,
    chosen: argparse.Namespace,
    parts: Mapping[str, Callable[[Path, argparse.Namespace], dict[str, Any]]],
) -> None:
    """Run the parts that are named, or else all, each in a folder of its own.

    The figures so far, with four digits, are reported after each.
    """
    if unknown := set(chosen.parts) - parts.keys():
        parser.error(f"no part is called {unknown.pop()}")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="meshrl-") as scratch:
        for name in chosen.parts or parts:
            folder = Path(scratch) / name
            folder.mkdir()
            figures |= parts[name](folder, chosen)
            report(
                {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
            )


def print_progress(told: object) -> None:
    """Print progress to stderr: a text, or JSON."""
    print(told if isinstance(told, str) else json.dumps(told), file=sys.stderr, flush=True)
