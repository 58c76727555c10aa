"""Says of a row's tests what a runner cannot do, before anything is scored by them."""

from __future__ import annotations


class Unsupported(Exception):
    """No runner of the job can run a row's tests; the text names what of them it cannot do."""
