"""Which checkpoints may go: all but the newest few up to the committed one, and those still being
written.
"""

from __future__ import annotations

from collections.abc import Sequence


def expired(names: Sequence[str], committed: str, keep: int) -> list[str]:
    """Names (sorted, oldest first) that no recovery can need.

    The committed checkpoint and the `keep` - 1 before it stay, and so does everything after it: a
    step that is being committed has written its checkpoint already. Without a committed one nothing
    goes.
    """
    if committed not in names:
        return []
    position = list(names).index(committed)
    return list(names[: max(0, position + 1 - max(1, keep))])
