"""Runs our side of a `verifiers` environment in an interpreter that has `verifiers`, not MeshRL.

`PYTHON -I boot.py ...`: of what lies here only the package `meshrl` becomes importable
there; nothing joins the path, so that what is installed beside us stays out of that environment.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).absolute().parents[3]


def lend() -> None:
    """Make `meshrl` importable from where it lies."""
    spec = importlib.util.spec_from_file_location(
        "meshrl", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["meshrl"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    lend()
    from meshrl.common.mesh.process.ends import failure

    try:
        from meshrl.services.environment.verifying.main import main

        main()
    except BaseException as error:
        failure.leave(error)
        raise
