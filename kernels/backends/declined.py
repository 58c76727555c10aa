"""The exception by which an implementation of an operator hands over to the reference."""

from __future__ import annotations


class Declined(Exception):
    """This implementation does not take these tensors.

    `reason` says what this machine lacks; it is empty where only these tensors do not fit.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
