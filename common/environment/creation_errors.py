"""Errors in the creation of a job's environment: permanent or transient."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.diagnosis.failure import FATAL_ERRORS, locate_error

# Errors that wrong code raises on every run. Other errors, such as of a slow server, are left to
# the caller, which counts how often they occur.
CODE_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, SyntaxError, TypeError, ValueError),
)


@contextlib.contextmanager
def convert_creation_errors(where: str = "") -> Iterator[None]:
    """Raise ConfigError for a permanent error, at `where` if the error has no location."""
    try:
        yield
    except Exception as error:
        if not is_permanent(error):
            raise
        raise ConfigError(
            f"the environment cannot be created: {type(error).__name__}: {error}",
            where=locate_error(error) or where,
            fix=f"Correct its code, or install the missing packages for {sys.executable}",
        ) from error


def is_permanent(error: BaseException) -> bool:
    """Return True if each start would fail in the same way.

    Errors that a disk, the memory, a network or another process raised first are not permanent.
    """
    if isinstance(error, FATAL_ERRORS):
        return True
    if isinstance(error, OSError) or not isinstance(error, CODE_ERRORS):
        return False
    return error.__cause__ is None or is_permanent(error.__cause__)
