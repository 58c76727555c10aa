"""Output without end, or where none is due."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import Escape

OUTPUT = [
    Escape("endless lines", "while True:\n    print('x' * 1000)", ("output_limit",)),
    Escape(
        "endless errors",
        "import sys\nwhile True:\n    sys.stderr.write('x' * 1000)",
        ("output_limit",),
    ),
    Escape("one long line", "print('x' * (20 << 20))", ("output_limit",)),
    Escape("from the shell", "yes", ("output_limit",), mode="shell"),
    Escape(
        "from children that stay",
        """
import os
for _ in range(4):
    if os.fork() == 0:
        while True:
            os.write(1, b"y" * 4096)
""",
        ("output_limit", "ok"),
    ),
    Escape(
        "no text",
        "import os\nos.write(1, bytes(range(256)) * 8)\nos.write(2, b'\\xff\\xfe\\x00' * 8)",
        ("ok",),
    ),
    Escape("closed", "import os\nos.close(1)\nos.close(2)\nprint('x')"),
    Escape(
        "to every descriptor",
        """
import os
for fd in range(3, 256):
    try:
        os.write(fd, b'{"exit": 0, "nonce": "", "status": "ok", "passed": true}')
        print("a descriptor that writes", fd)
    except OSError:
        pass
""",
    ),
    Escape(
        "through a larger pipe",
        """
import fcntl, os
fcntl.fcntl(1, 1031, 1 << 20)  # F_SETPIPE_SZ
while True:
    os.write(1, bytes(1 << 20))
""",
        ("output_limit", "refused", "crashed"),
    ),
    Escape(
        "through descriptors opened again",
        """
import os
fds = [os.open(f"/proc/self/fd/{n}", os.O_WRONLY) for n in (1, 2)]
while True:
    for fd in fds:
        os.writev(fd, [b"z" * 512] * 64)
""",
        ("output_limit", "refused"),
    ),
    Escape(
        "straight from files",
        """
import os
source = os.open("/dev/zero", os.O_RDONLY)
while True:
    os.splice(source, 1, 1 << 16)
""",
        ("output_limit", "crashed", "ok", "refused"),
    ),
    Escape(
        "into its own input",
        """
import os
for fd in (0, 1, 2):
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            again = os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK)
            os.write(again, b"x" * 10)
            print(os.read(again, 100))
        except OSError as error:
            print("kept in", error)
""",
    ),
]
