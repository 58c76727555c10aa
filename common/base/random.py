"""Random numbers: every draw of a run comes from one seed, and each part has its own stream."""

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
        """Create a generator seeded by the operating system: no two processes draw the same
        numbers.
        """
        return cls(os.urandom(16).hex())

    def child(self, name: str) -> Random:
        """Return a stream that depends only on this seed and `name`, not on earlier draws."""
        return Random(hashlib.blake2b(f"{self.name}/{name}".encode(), digest_size=16).hexdigest())

    def hex_token(self, nbytes: int = 8) -> str:
        """Return `nbytes` random bytes in hexadecimal."""
        return f"{self.getrandbits(8 * nbytes):0{2 * nbytes}x}"
