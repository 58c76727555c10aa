"""Router between hosts: its init process, which delays all packets by the same time.

It starts in a network namespace of its own. Packets from the hosts' links are routed to a tunnel
here. Each packet read from the tunnel is written back after the delay, and then routed to its link.
Connections are end to end, between the hosts' kernels. Segments that the kernel has not cut yet
stay whole, up to 64 KiB, so that a gigabit a second is some 2,000 packets. Ends when its standard
input does.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

DEVICE = "delay"
QUEUE = 20_000  # packets in the tunnel, so that none is lost while this process waits for a core
BATCH = 256  # packets that are read before those that are due are written
PACKET_BYTES = 10 + (1 << 16)  # header of virtio, and the longest segment
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
CHECKSUM_TSO4_TSO6_ECN = 0x01 | 0x02 | 0x04 | 0x08  # offloads left to the reader


def opened() -> int:
    """Return the tunnel's descriptor; OSError if this kernel does not support tunnels."""
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tunnel, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(tunnel, TUNSETOFFLOAD, CHECKSUM_TSO4_TSO6_ECN)
    subprocess.run(["ip", "link", "set", DEVICE, "up", "txqueuelen", str(QUEUE)], check=True)
    return tunnel


def pass_on(tunnel: int, delay_s: float) -> None:
    """Forward packets until standard input ends."""
    held: deque[tuple[float, bytes]] = deque()
    while True:
        left = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([0, tunnel], [], [], left)
        if 0 in ready and not os.read(0, 1):
            return
        if tunnel in ready:
            due = time.monotonic() + delay_s
            for _ in range(BATCH):
                try:
                    held.append((due, os.read(tunnel, PACKET_BYTES)))
                except BlockingIOError:
                    break
        now = time.monotonic()
        while held and held[0][0] <= now:
            try:
                os.write(tunnel, held.popleft()[1])
            except OSError as error:  # no route to a killed host: dropped, as by any router
                print(f"router drops a packet: {error}", file=sys.stderr, flush=True)


def main() -> None:
    delay_s = float(sys.argv[1])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    tunnel = opened() if delay_s else -1
    print("ready", flush=True)
    if delay_s:
        pass_on(tunnel, delay_s)
    else:
        while os.read(0, 1):
            pass


if __name__ == "__main__":
    main()
