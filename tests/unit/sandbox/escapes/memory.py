"""Memory beyond the limit, by all ways to have some."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import SPENT, SYSCALL, Escape, tries

MEMORY = [
    Escape("lists", "kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))", SPENT),
    Escape("one block", "bytearray(1 << 40)", SPENT),
    Escape(
        "maps",
        """
import mmap
kept = []
while True:
    kept.append(mmap.mmap(-1, 1 << 24))
    for place in range(0, 1 << 24, 4096):
        kept[-1][place] = 1
""",
        SPENT,
    ),
    Escape(
        "many children",
        """
import os, time
for _ in range(20):
    try:
        if os.fork() == 0:
            kept = bytearray(60 << 20)
            for place in range(0, len(kept), 4096):
                kept[place] = 1
            time.sleep(30)
            os._exit(0)
    except OSError:
        break
time.sleep(1)
""",
    ),
    Escape(
        "files in memory",
        """
import os
fds = []
while True:
    fds.append(os.memfd_create("x"))
    for _ in range(60):
        os.write(fds[-1], bytes(1 << 20))
""",
        SPENT,
    ),
    Escape(
        "locked",
        SYSCALL
        + """
import mmap
block = mmap.mmap(-1, 1 << 24)
address = ctypes.addressof(ctypes.c_char.from_buffer(block))
result = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 24))
print("ESCAPED" if result == 0 else "kept in")
""",
    ),
    Escape(
        "deep recursion",
        """
import sys
sys.setrecursionlimit(10**9)
def down(n):
    return [down(n + 1)]
while True:  # an interpreter that is out of memory first ends the recursion by a SystemError
    try:
        down(0)
    except BaseException:
        pass
""",
        SPENT,
    ),
    Escape("large number", "print(len(str(10 ** 10 ** 9)))", (*SPENT, "ok")),
    Escape(
        "shared segments",
        SYSCALL
        + "\nresult = syscall(29, 0, 1 << 30, 0o1666)\nprint('ESCAPED' if result >= 0 else result)",
    ),
    Escape(
        "many files in memory",
        """
import os
kept, total = [], 0
try:
    while total < 256 << 20:
        kept.append(os.memfd_create("x"))
        for _ in range(30):
            total += os.write(kept[-1], bytes(1 << 20))
    print("ESCAPED", total)
except OSError as error:
    print("kept in", total, error)
""",
    ),
    Escape(
        "large pages in files",
        tries("os.memfd_create('x', os.MFD_HUGETLB)", "called(447, 0)", setup=SYSCALL),
    ),
    Escape(
        "shared maps that children keep",
        """
import mmap, os, time
total = 0
try:
    for _ in range(6):
        block = mmap.mmap(-1, 48 << 20)
        for place in range(0, len(block), 4096):
            block[place] = 1
        total += len(block)
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        block.close()
    time.sleep(1.2)  # where nobody counts with each page, the keeper looks
    print("ESCAPED", total)
except OSError as error:
    print("kept in", total, error)
""",
    ),
    Escape(
        "children that hold some each",
        """
import os, time
reading, writing = os.pipe()
made = 0
for _ in range(5):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        kept = bytearray(60 << 20)
        for place in range(0, len(kept), 4096):
            kept[place] = 1
        os.write(writing, b".")
        time.sleep(60)
        os._exit(0)
    made += 1
os.close(writing)
for _ in range(made):
    if not os.read(reading, 1):
        break
else:
    time.sleep(1.2)
    print("ESCAPED" if made == 5 else "kept in", made)
""",
    ),
    Escape(
        "room in pipes and sockets",
        """
import fcntl, os, socket
kept, total = [], 0
def fill(fd):
    global total
    os.set_blocking(fd, False)
    try:
        while True:
            total += os.write(fd, bytes(1 << 16))
    except OSError:
        pass
try:
    while total < 256 << 20:
        kept.append(os.pipe())
        try:
            fcntl.fcntl(kept[-1][1], 1031, 1 << 20)
        except OSError:
            pass
        fill(kept[-1][1])
        kept.append(socket.socketpair())
        fill(kept[-1][0].fileno())
    print("ESCAPED", total)
except OSError as error:
    print("kept in", total, error)
""",
    ),
    Escape(
        "timers and waiting signals",
        SYSCALL
        + """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))
room, count = ctypes.c_int(0), 0
while count < 50_000 and syscall(222, 1, None, ctypes.byref(room)) >= 0:
    count += 1
while count < 50_000 and libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0:
    count += 1
print("ESCAPED" if count == 50_000 else "kept in", count)
""",
    ),
]
