"""The interface of a worker: a hint to read its gang's record again."""

from __future__ import annotations

from common.api.hint import Look
from common.runtime.interface import Cast, Interface


class Worker(Interface):
    """The methods of a worker."""

    look = Cast(Look)
