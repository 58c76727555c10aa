"""Guard around drawing, reports and trackers: a fault there costs a run a warning, never its
result.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def warn(text: str) -> None:
    """Print a warning to standard error, unless that is closed."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return


class WarningGuard:
    """Guard that turns each exception of its block into one warning; a repeated one is printed
    once.
    """

    def __init__(self, on_warning: Callable[[str], None] = warn) -> None:
        self._on_warning = on_warning
        self._printed: set[str] = set()

    @contextmanager
    def __call__(self, description: str) -> Iterator[None]:
        """Run the block; on an exception, warn that `description` failed and continue after the
        block.
        """
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{Path(place.filename).name}:{place.lineno}"
            text = f"warning: {description} failed: {type(error).__name__}: {error} ({at})"
            if text not in self._printed:
                self._printed.add(text)
                self._on_warning(f"{text}; the run continues without it")
