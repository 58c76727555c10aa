"""Entry point of `meshrl` and `python -m meshrl`."""

from __future__ import annotations

import os
import sys

from meshrl.cli import app
from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.terminal import escape_controls, print_traceback
from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK
from meshrl.directory import process_user

LONG_LIVED_COMMANDS = (
    ["up"],
    ["join"],
)  # they have a home directory for themselves and what they start


def main() -> None:
    """Run the command line; print an error of ours as one line with its fix, without a trace.

    Text of an error may come from models and other hosts.
    """
    if sys.argv[1:2] != ["init"]:  # the author sets the permissions of a project's files
        os.umask(PRIVATE_UMASK)
    if sys.argv[1:2] not in LONG_LIVED_COMMANDS:
        process_user.ensure_temporary_home()
    try:
        app()
    except MeshError as error:
        print(escape_controls(f"error: {error}"), file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # a fault of MeshRL
        print_traceback(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    main()
