"""The making of a job's environment: what is wrong with it for good, and what may pass."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from meshrl.common.base.errors import ConfigError
from meshrl.common.mesh.process.ends.failure import FATAL, place_of

# What wrong code raises each time that it runs. Others, as of a server that is slow today, are left
# to whoever counts how often they come.
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, SyntaxError, TypeError, ValueError),
)


@contextlib.contextmanager
def making(where: str = "") -> Iterator[None]:
    """Raises ConfigError, at `where` if the error has no place, if no start would go better."""
    try:
        yield
    except Exception as error:
        if not lasting(error):
            raise
        raise ConfigError(
            f"the environment cannot be made: {type(error).__name__}: {error}",
            where=place_of(error) or where,
            fix=f"mend it, or install what is missing for {sys.executable}",
        ) from error


def lasting(error: BaseException) -> bool:
    """Whether each start would end so; not by what a disk, the memory, a network or another process
    raised first.
    """
    if isinstance(error, FATAL):
        return True
    if isinstance(error, OSError) or not isinstance(error, MISTAKES):
        return False
    return error.__cause__ is None or lasting(error.__cause__)
