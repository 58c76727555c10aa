"""Says of a row's tests what a runner cannot do, before anything is scored by them."""

from __future__ import annotations

import ast

from common.grading import reading


class Unsupported(Exception):
    """No runner of the job can run a row's tests; the text names what of them it cannot do.

    `provoked`: it has come to this by what an object of the solution does, so another solution, or
    the same one with a mind to, decides about it; by what the tests do otherwise.
    """

    def __init__(self, what: str, provoked: bool = False) -> None:
        super().__init__(what)
        self.provoked = provoked


def unsupported(tests: str) -> tuple[str, ...]:
    """Names each thing in these tests in Python that the runner `isolated` cannot do, as "fixture
    caplog" or "import numpy (not in the jail)", in the order of the source; empty if it can run all
    of them. It reads and runs nothing. What shows only when tests run is told then (`Unsupported`).
    """
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        return (f"syntax error, line {error.lineno}",)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, nested too deep
        return (f"no Python: {type(error).__name__}",)
    return tuple(dict.fromkeys(reading.TestReader().read(tree)))
