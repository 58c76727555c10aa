"""The secret of a mesh: who knows it belongs to the mesh. Passwords are derived from it,
so that it is never sent itself.
"""

from __future__ import annotations

import hashlib

SECRET_BYTES = 32


def derived(secret: str, purpose: str) -> bytes:
    """32 bytes for one purpose ("redis/trainer"), by keyed BLAKE2b; those of one
    purpose tell nothing of those of another, or of the secret.
    """
    return hashlib.blake2b(purpose.encode(), key=bytes.fromhex(secret), digest_size=32).digest()
