"""Runs our side of a `verifiers` environment in an interpreter that has `verifiers`, not MeshRL.

`PYTHON -I boot.py ...`: of this tree only the packages `common` and `services` become importable
there; nothing joins the path, so that what is installed beside us stays out of that environment.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def lend(package: str) -> None:
    """Makes one of our packages importable from where it lies."""
    home = ROOT / package
    spec = importlib.util.spec_from_file_location(
        package, home / "__init__.py", submodule_search_locations=[str(home)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    for name in ("common", "services"):
        lend(name)
    from common.mesh.process.ends import failure

    try:
        from services.environment.verifying.main import main

        main()
    except BaseException as error:
        failure.leave(error)
        raise
