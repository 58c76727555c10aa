"""Standard output and error of a process whose log may lie on a full disk: what there is no room
for is lost, and nobody fails for it.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Lossy(io.FileIO):
    """A descriptor that takes everything, and forgets what a full disk does not."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return len(memoryview(content).cast("B"))


def outlive_a_full_disk() -> None:
    """Makes this process's own standard output and error such streams, unless somebody has put
    others in their place.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__") or stream.isatty():
            continue
        lossy = io.TextIOWrapper(
            io.BufferedWriter(_Lossy(number, "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
            write_through=name == "stderr",
        )
        setattr(sys, name, lossy)
        setattr(sys, f"__{name}__", lossy)
