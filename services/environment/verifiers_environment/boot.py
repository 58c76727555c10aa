"""Entry point of a `verifiers` environment in an interpreter that has `verifiers`, not MeshRL.

`PYTHON -I boot.py ...`: only the package `meshrl` becomes importable there. Nothing joins the path,
so that packages installed beside MeshRL stay out of that environment.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE_DIRECTORY = Path(__file__).absolute().parents[3]


def make_importable() -> None:
    """Make `meshrl` importable from its own directory."""
    spec = importlib.util.spec_from_file_location(
        "meshrl",
        PACKAGE_DIRECTORY / "__init__.py",
        submodule_search_locations=[str(PACKAGE_DIRECTORY)],
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["meshrl"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    make_importable()
    from meshrl.common.mesh.process.diagnosis import failure

    try:
        from meshrl.services.environment.verifiers_environment.main import main

        main()
    except BaseException as error:
        failure.write_failure(error)
        raise
