"""Sockets of all kinds: a jail has no network."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import SYSCALL, Escape, opens_socket, tries

NETWORK = [
    Escape("tcp", opens_socket("socket.socket()")),
    Escape("udp", opens_socket("socket.socket(socket.AF_INET, socket.SOCK_DGRAM)")),
    Escape("ipv6", opens_socket("socket.socket(socket.AF_INET6)")),
    Escape("unix", opens_socket("socket.socket(socket.AF_UNIX)")),
    Escape("netlink", opens_socket("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)")),
    Escape(
        "packets",
        opens_socket("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300)"),
    ),
    Escape("pair of another family", opens_socket("socket.socketpair(socket.AF_INET)")),
    Escape(
        "download",
        """
import urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:1/", timeout=1)
    print("ESCAPED")
except OSError as error:
    print("kept in" if "Operation not permitted" in str(error) else "ESCAPED", error)
""",
    ),
    Escape("shell", "exec 3<>/dev/tcp/127.0.0.1/22 && echo ESCAPED", mode="shell"),
    Escape(
        "interfaces",
        """
import os
names = os.listdir("/sys/class/net") if os.path.exists("/sys/class/net") else []
print("ESCAPED" if names else "kept in", names)
""",
    ),
    Escape(
        "every family",
        """
import socket
for family in range(1, 64):
    for kind in (1, 2, 3, 5):
        try:
            print("ESCAPED", socket.socket(family, kind))
        except OSError:
            pass
        if family != socket.AF_UNIX:
            try:
                print("ESCAPED", socket.socketpair(family, kind))
            except OSError:
                pass
""",
        ("ok",),
    ),
    Escape(
        "a name for a pair's end",
        tries(
            'one.bind("\\0" + "a name")',
            'called(49, two.fileno(), struct.pack("H", 1), 2)',
            'other.bind("/tmp/name")',
            "one.listen()",
            "called(288, one.fileno(), 0, 0, 0)",
            "called(42, one.fileno(), struct.pack('H', 0), 2)",
            setup=SYSCALL
            + """
import socket, struct
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
two, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
""",
        ),
    ),
    Escape(
        "out of band",
        tries(
            "one.send(b'x', socket.MSG_OOB)",
            "called(46, one.fileno(), bytes(56), 1)",
            "called(307, one.fileno(), bytes(64), 1, 1)",
            setup=SYSCALL + "import socket\none, other = socket.socketpair()\n",
        ),
    ),
    Escape(
        "a filter of its own on a socket",
        tries(
            "one.setsockopt(socket.SOL_SOCKET, 26, struct.pack('HxxxxxxP', 1, address))",
            "one.setsockopt(socket.SOL_SOCKET, 50, struct.pack('i', 3))",
            "one.setsockopt(socket.SOL_SOCKET, 25, b'lo')",
            setup=SYSCALL
            + """
import socket, struct
one, other = socket.socketpair()
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xFFFF))
address = ctypes.addressof(code)
""",
        ),
    ),
    Escape(
        "who else has sockets",
        """
try:
    lines = open("/proc/net/unix").read().splitlines()[1:]
    print("ESCAPED" if any("@" in line or "/" in line.split(" ", 7)[-1] for line in lines) else "none")
except OSError as error:
    print("kept in", error)
""",  # noqa: E501
    ),
]
