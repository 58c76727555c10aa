"""Runner of the changed tests that start no process: `make check`.

Usage:

    python -m tests.runner.changed BASE

It selects the test files that differ from the commit BASE or import a module that does. Files whose
tests start processes, and tests beyond the time limit, are left to `make test`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP_AFTER_S = 25.0
LINKED = {place.name for place in (ROOT / "meshrl").iterdir() if place.is_symlink()}
# Files whose tests start processes contain one of these names.
STARTS = ("subprocess", "SystemHost", "os.fork", "running_server", "on_mesh", "needs(")


def changed_files(base: str) -> set[Path]:
    """Return the Python files that differ from a commit or are untracked."""
    listed = ""
    for words in (("diff", "--name-only", base), ("ls-files", "--others", "--exclude-standard")):
        command = ["git", "-C", str(ROOT), *words]
        listed += subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = {ROOT / name for name in listed.split() if name.endswith(".py")}
    return {path for path in paths if path.exists()}


def module_name(path: Path) -> str:
    """Return the name by which a file of the repository is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("meshrl", *parts) if parts[0] in LINKED else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> set[str]:
    """Return the modules that a file imports, and the names imported from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def in_process_tests(changed: Iterable[Path]) -> list[Path]:
    """Return the test files that are changed or import a changed module, and start no process."""
    changed = set(changed)
    modules = {module_name(path) for path in changed}
    found = []
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        text = path.read_text()
        if any(name in text for name in STARTS):
            continue
        if path in changed or modules & imported_names(path):
            found.append(path)
    return found


def main() -> int:
    """Run the selected tests and return pytest's exit status."""
    tests = in_process_tests(changed_files(sys.argv[1]))
    if not tests:
        print("no test in process is of what was changed")
        return 0
    words = ["--workers", "2", "--stop-after", str(STOP_AFTER_S), *map(str, tests)]
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
