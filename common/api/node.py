"""What a worker offers: a hint to look at its gang's record."""

from __future__ import annotations

from common.api.hint import Look
from common.runtime.interface import Cast, Interface


class Worker(Interface):
    """The methods of a worker."""

    look = Cast(Look)
