"""The product grows no further than `pyproject.toml` says."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PRODUCT = ("common", "kernels", "meshrl", "services", "sim")


def test_the_product_has_no_more_lines_than_its_limit() -> None:
    files = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    lines = sum(len(path.read_bytes().splitlines()) for path in files)
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["meshrl"]["product_lines"]
    assert len(files) > len(PRODUCT)
    assert lines <= limit, f"{lines} lines of Python; the limit in pyproject.toml is {limit}"
