"""Ports of an SGLang server, which no other server of this product gets on the same host."""

from __future__ import annotations

import os
import socket

from meshrl.common.base.errors import ConfigError

# SGLang binds some ports a minute after their choice. The kernel gives ports of this range to no
# program that asks for any port (its range begins at 32768 by default).
FIRST_PORT, END_PORT = 20000, 30000
BLOCK_PORTS = 16  # HTTP, ranks, and with `--enable-dp-attention` 1 + 6 derived from a third


class PortBlock:
    """Block of ports that this process holds until `release`.

    A name in the network namespace, which disappears with the process, keeps others from the block:
    the ports themselves must be free for the server.
    """

    def __init__(self, first: int, holder: socket.socket | None = None) -> None:
        self._first, self._holder = first, holder

    @property
    def http(self) -> int:
        return self._first

    @property
    def ranks(self) -> int:
        """Port at which the ranks meet (`--nccl-port`)."""
        return self._first + 1

    @property
    def data_parallel(self) -> int:
        """First of the ports of data-parallel attention (`--dist-init-addr`)."""
        return self._first + 2

    @classmethod
    def reserve(cls) -> PortBlock:
        """Reserve a block whose ports are all free now; raise ConfigError if none is found."""
        starts = range(FIRST_PORT, END_PORT, BLOCK_PORTS)
        own = os.getpid() % len(starts)  # so that processes seldom try the same ones
        for first in [*starts[own:], *starts[:own]]:
            holder = socket.socket(socket.AF_UNIX)
            try:
                holder.bind(f"\0meshrl-ports-{first}")
            except OSError:
                holder.close()
                continue
            if all(map(_is_free, range(first, first + BLOCK_PORTS))):
                return cls(first, holder)
            holder.close()
        raise ConfigError(
            f"all blocks of {BLOCK_PORTS} ports from {FIRST_PORT} to {END_PORT} are in use",
            where="SGLang's ports",
            fix="Stop programs that listen there",
        )

    def release(self) -> None:
        if self._holder is not None:
            self._holder.close()


def _is_free(port: int) -> bool:
    """Return True if a server could listen at a port on any interface."""
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
