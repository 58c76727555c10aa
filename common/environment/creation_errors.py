"""The making of a job's environment: what is wrong with it for good, and what may pass."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.diagnosis.failure import FATAL_ERRORS, locate_error

# What wrong code raises each time that it runs. Others, as of a server that is slow today, are left
# to whoever counts how often they come.
CODE_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, SyntaxError, TypeError, ValueError),
)


@contextlib.contextmanager
def convert_creation_errors(where: str = "") -> Iterator[None]:
    """Raises ConfigError, at `where` if the error has no place, if no start would go better."""
    try:
        yield
    except Exception as error:
        if not is_permanent(error):
            raise
        raise ConfigError(
            f"the environment cannot be made: {type(error).__name__}: {error}",
            where=locate_error(error) or where,
            fix=f"mend it, or install what is missing for {sys.executable}",
        ) from error


def is_permanent(error: BaseException) -> bool:
    """Whether each start would end so; not by what a disk, the memory, a network or another process
    raised first.
    """
    if isinstance(error, FATAL_ERRORS):
        return True
    if isinstance(error, OSError) or not isinstance(error, CODE_ERRORS):
        return False
    return error.__cause__ is None or is_permanent(error.__cause__)
