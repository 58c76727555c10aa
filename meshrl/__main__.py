"""The entry of `meshrl` and `python -m meshrl`."""

from __future__ import annotations

import os
import sys

from common.errors import MeshError
from common.process.child import PRIVATE
from meshrl.cli import app


def main() -> None:
    """Runs the command line; an error of ours is one line with its fix, not a trace."""
    if sys.argv[1:2] != ["init"]:  # whom the files of a project are for, its author says
        os.umask(PRIVATE)
    try:
        app()
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
