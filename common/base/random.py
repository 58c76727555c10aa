"""Random numbers: every draw of a run comes from one seed, and each part has a stream of its
own.
"""

from __future__ import annotations

import hashlib
import os
import random


class Random(random.Random):
    """Python's generator with named child streams."""

    def __init__(self, seed: int | str = 0) -> None:
        super().__init__(seed)
        self.name = str(seed)

    @classmethod
    def from_os_entropy(cls) -> Random:
        """Seeded by the operating system: no two processes draw the same."""
        return cls(os.urandom(16).hex())

    def child(self, name: str) -> Random:
        """A stream that depends on this seed and `name` only, not on what has been drawn."""
        return Random(hashlib.blake2b(f"{self.name}/{name}".encode(), digest_size=16).hexdigest())

    def hex_token(self, nbytes: int = 8) -> str:
        """`nbytes` random bytes in hexadecimal."""
        return f"{self.getrandbits(8 * nbytes):0{2 * nbytes}x}"
