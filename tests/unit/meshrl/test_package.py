"""What an installed MeshRL holds: every file of its packages, not only the Python ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILT = {".pyc", ".pyi"}
INSTALLED = ("meshrl", "services", "common", "kernels", "sim")


@pytest.mark.parametrize("package", INSTALLED)
def test_files_that_are_no_modules_are_declared(package: str) -> None:
    """A job, a script of Redis or C++ that the wheel lacked would be missed at its first use."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    name = package if package == "meshrl" else f"meshrl.{package}"
    patterns = declared["package-data"].get(name, [])
    held = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    files = {p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    modules = {p for p in files if p.suffix == ".py" and (p.parent / "__init__.py").is_file()}
    assert sorted(map(str, files - modules - held)) == []
