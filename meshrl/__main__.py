"""Entry point of `meshrl` and `python -m meshrl`."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

from meshrl.cli import app
from meshrl.common.base.errors import MeshError
from meshrl.common.base.host.terminal import escape_controls, print_traceback
from meshrl.common.mesh.process.entry.child import PRIVATE_UMASK
from meshrl.directory import process_user

LONG_LIVED_COMMANDS = (
    ["up"],
    ["join"],
)  # they have a home directory for themselves and what they start

# Environment variables by their old names, which still work.
RENAMED_VARIABLES = {
    "MESHRL_NURSERY": "MESHRL_FORK_SERVER",
    "MESHRL_STAND_FOR": "MESHRL_EMULATED_ACCELERATORS",
}


def replace_old_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Move values of old environment variables to their new names; return a notice for each.

    A new name that is set as well keeps its value.
    """
    found = [(old, new) for old, new in RENAMED_VARIABLES.items() if old in environ]
    for old, new in found:
        environ.setdefault(new, environ.pop(old))
    return [f"${old} is deprecated: set ${new}" for old, new in found]


def main() -> None:
    """Run the command line; print an error of ours as one line with its fix, without a trace.

    Text of an error may come from models and other hosts.
    """
    for notice in replace_old_variables(os.environ):
        print(notice, file=sys.stderr)
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
