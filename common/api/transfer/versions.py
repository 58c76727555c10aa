"""How messages refer to a weight version."""

from __future__ import annotations

from common.base.encoding.messages import message


@message
class Base:
    """A version that another one refers to, or that somebody has."""

    lineage: int
    version: int
    digest: str  # of its manifest
