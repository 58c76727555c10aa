"""Programs that try to get out of a jail, or to harm what is outside, by family.

A program prints ESCAPED when it has done what it must not. It is contained when that word never
appears, when it ends as one of `ends`, and when what `runner` looks at outside is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY = ("ok", "timeout", "out_of_memory", "output_limit", "refused", "crashed")
SPENT = ("timeout", "out_of_memory", "refused", "crashed")
CANARY = "@CANARY@"  # stands for a file outside that every user may read


@dataclass(frozen=True)
class Escape:
    family: str
    name: str
    source: str
    ends: tuple[str, ...] = ANY
    mode: str = "program"


_SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    return result if result >= 0 else -ctypes.get_errno()
"""  # noqa: E501


def _socket(call: str) -> str:
    return f"""
import socket
try:
    s = {call}
    print("ESCAPED", s)
except OSError as error:
    print("kept in", error)
"""


def _call(name: str, number: int, *arguments: object) -> Escape:
    """A system call (its number on x86-64) that must not succeed."""
    text = ", ".join(map(str, (number, *arguments)))
    source = (
        _SYSCALL
        + f"""
result = syscall({text})
print("ESCAPED" if result >= 0 else "kept in", result)
"""
    )
    return Escape("kernel", name, source, ("ok",))


def _reads(path: str) -> str:
    return f"""
try:
    with open({path!r}, "rb") as file:
        print("ESCAPED", file.read(64))
except OSError as error:
    print("kept in", error)
"""


def _writes(path: str) -> str:
    return f"""
try:
    with open({path!r}, "ab") as file:
        file.write(b"x")
        file.flush()
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
"""


NETWORK = [
    Escape("network", "tcp", _socket("socket.socket()")),
    Escape("network", "udp", _socket("socket.socket(socket.AF_INET, socket.SOCK_DGRAM)")),
    Escape("network", "ipv6", _socket("socket.socket(socket.AF_INET6)")),
    Escape("network", "unix", _socket("socket.socket(socket.AF_UNIX)")),
    Escape("network", "netlink", _socket("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)")),
    Escape(
        "network", "packets", _socket("socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300)")
    ),
    Escape("network", "pair of another family", _socket("socket.socketpair(socket.AF_INET)")),
    Escape(
        "network",
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
    Escape("network", "shell", "exec 3<>/dev/tcp/127.0.0.1/22 && echo ESCAPED", mode="shell"),
    Escape(
        "network",
        "interfaces",
        """
import os
names = os.listdir("/sys/class/net") if os.path.exists("/sys/class/net") else []
print("ESCAPED" if names else "kept in", names)
""",
    ),
]

FILESYSTEM = [
    Escape("filesystem", "read a file of the host", _reads(CANARY)),
    Escape("filesystem", "write a file of the host", _writes(CANARY)),
    Escape("filesystem", "write below usr", _writes("/usr/bin/planted")),
    Escape("filesystem", "write below etc", _writes("/etc/passwd")),
    Escape("filesystem", "write at the root", _writes("/planted")),
    Escape("filesystem", "write a device", _writes("/dev/planted")),
    Escape("filesystem", "read passwords", _reads("/etc/shadow")),
    Escape("filesystem", "read the kernel's log", _reads("/dev/kmsg")),
    Escape(
        "filesystem",
        "read home",
        "import os\nprint(os.listdir('/root'), os.listdir('/home'), 'ESCAPED')",
    ),
    Escape(
        "filesystem",
        "make a device",
        """
import os, stat
try:
    os.mknod("/tmp/sda", 0o666 | stat.S_IFBLK, os.makedev(8, 0))
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
    Escape(
        "filesystem",
        "out of a changed root",
        """
import os
try:
    os.mkdir("/tmp/new")
    os.chroot("/tmp/new")
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
    Escape(
        "filesystem",
        "links out",
        f"""
import os
for target in ("/proc/1/root{CANARY}", "/proc/self/root{CANARY}", "../../../../../../..{CANARY}"):
    os.symlink(target, "/tmp/link")
    try:
        print("ESCAPED", open("/tmp/link").read())
    except OSError as error:
        print("kept in", error)
    os.unlink("/tmp/link")
""",
    ),
    Escape(
        "filesystem",
        "fill the disk",
        """
with open("/tmp/large", "wb") as file:
    for _ in range(10_000):
        file.write(bytes(1 << 20))
print("ESCAPED")
""",
        SPENT,
    ),
    Escape(
        "filesystem",
        "fill the disk with many files",
        """
import os
for number in range(1000):
    with open(f"/tmp/part{number}", "wb") as file:
        file.write(bytes(1 << 20))
print("ESCAPED")
""",
        SPENT,
    ),
    Escape(
        "filesystem",
        "use up inodes",
        """
import os
for number in range(1_000_000):
    os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
print("ESCAPED")
""",
        SPENT,
    ),
    Escape(
        "filesystem",
        "open everything",
        "files = [open('/dev/null') for _ in range(100_000)]\nprint('ESCAPED')",
        SPENT,
    ),
]

PROCESSES = [
    Escape("processes", "fork bomb", "import os\nwhile True:\n    os.fork()", SPENT),
    Escape(
        "processes",
        "fork bomb that goes on",
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        SPENT,
    ),
    Escape("processes", "shell bomb", "b() { b | b & }; b; sleep 100", mode="shell"),
    Escape(
        "processes",
        "thread bomb",
        """
import threading, time
for _ in range(10_000):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
print("ESCAPED")
""",
        SPENT,
    ),
    Escape(
        "processes",
        "daemon that outlives",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
print("parent ends")
""",
    ),
    Escape(
        "processes",
        "kill everybody",
        """
import os, signal
try:
    os.kill(-1, signal.SIGKILL)
except OSError as error:
    print("kept in", error)
""",
    ),
    Escape(
        "processes",
        "kill the keeper",
        """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGCHLD):
    try:
        os.kill(1, number)
    except OSError as error:
        print("kept in", error)
print("still watched")
""",
    ),
    Escape(
        "processes",
        "become root",
        """
import os
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0])):
    try:
        change()
        print("ESCAPED")
    except OSError as error:
        print("kept in", error)
""",
    ),
    Escape("processes", "su", "su -c 'echo ESCAPED' </dev/null; /bin/mount && echo", mode="shell"),
    Escape(
        "processes",
        "trace the keeper",
        _SYSCALL
        + "\nresult = syscall(101, 16, 1, 0, 0)\nprint('ESCAPED' if result >= 0 else result)",
    ),
    Escape(
        "processes",
        "raise own limits",
        """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
    soft, hard = resource.getrlimit(which)
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
        print("ESCAPED")
    except (ValueError, OSError) as error:
        print("kept in", error)
""",
    ),
    Escape(
        "processes",
        "take limits from the keeper",
        """
import resource
try:
    resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
]

MEMORY = [
    Escape("memory", "lists", "kept = []\nwhile True:\n    kept.append(bytearray(1 << 20))", SPENT),
    Escape("memory", "one block", "bytearray(1 << 40)", SPENT),
    Escape(
        "memory",
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
        "memory",
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
        "memory",
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
        "memory",
        "locked",
        _SYSCALL
        + """
import mmap
block = mmap.mmap(-1, 1 << 24)
address = ctypes.addressof(ctypes.c_char.from_buffer(block))
result = libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 24))
print("ESCAPED" if result == 0 else "kept in")
""",
    ),
    Escape(
        "memory",
        "deep recursion",
        """
import sys
sys.setrecursionlimit(10**9)
def down(n):
    return [down(n + 1)]
down(0)
""",
        SPENT,
    ),
    Escape("memory", "large number", "print(len(str(10 ** 10 ** 9)))", (*SPENT, "ok")),
    Escape(
        "memory",
        "shared segments",
        _SYSCALL
        + "\nresult = syscall(29, 0, 1 << 30, 0o1666)\nprint('ESCAPED' if result >= 0 else result)",
    ),
]

OUTPUT = [
    Escape("output", "endless lines", "while True:\n    print('x' * 1000)", ("output_limit",)),
    Escape(
        "output",
        "endless errors",
        "import sys\nwhile True:\n    sys.stderr.write('x' * 1000)",
        ("output_limit",),
    ),
    Escape("output", "one long line", "print('x' * (20 << 20))", ("output_limit",)),
    Escape("output", "from the shell", "yes", ("output_limit",), mode="shell"),
    Escape(
        "output",
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
        "output",
        "no text",
        "import os\nos.write(1, bytes(range(256)) * 8)\nos.write(2, b'\\xff\\xfe\\x00' * 8)",
        ("ok",),
    ),
    Escape("output", "closed", "import os\nos.close(1)\nos.close(2)\nprint('x')"),
    Escape(
        "output",
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
]

SIGNALS = [
    Escape(
        "signals",
        "ignore all",
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
        ("timeout",),
    ),
    Escape(
        "signals",
        "block all",
        """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass
""",
        ("timeout",),
    ),
    Escape(
        "signals",
        "stop itself",
        "import os\nos.kill(os.getpid(), 19)\nprint('on')",
        ("timeout", "ok"),
    ),
    Escape("signals", "kill itself", "import os\nos.kill(os.getpid(), 9)", ("crashed",)),
    Escape("signals", "segmentation fault", "import ctypes\nctypes.string_at(0)", ("crashed",)),
    Escape("signals", "abort", "import os\nos.abort()", ("crashed",)),
    Escape(
        "signals",
        "storm",
        """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: None)
while True:
    os.kill(os.getpid(), signal.SIGUSR1)
    try:
        os.kill(1, signal.SIGCHLD)
    except OSError:
        pass
""",
        ("timeout",),
    ),
    Escape(
        "signals",
        "group",
        "import os, signal\nos.killpg(0, signal.SIGKILL)\nprint('on')",
        ("crashed", "ok"),
    ),
]

PROC = [
    Escape("proc", "memory of the keeper", _reads("/proc/1/mem")),
    Escape("proc", "surroundings of the keeper", _reads("/proc/1/environ")),
    Escape(
        "proc",
        "descriptors of the keeper",
        """
import os
try:
    for name in os.listdir("/proc/1/fd"):
        os.write(os.open(f"/proc/1/fd/{name}", os.O_RDWR), b"x")
        print("ESCAPED", name)
except OSError as error:
    print("kept in", error)
""",
    ),
    Escape("proc", "root of the keeper", "import os\nprint(os.listdir('/proc/1/root'), 'ESCAPED')"),
    Escape("proc", "settings of the kernel", _writes("/proc/sys/kernel/core_pattern")),
    Escape("proc", "host name", _writes("/proc/sys/kernel/hostname")),
    Escape("proc", "more namespaces", _writes("/proc/sys/user/max_user_namespaces")),
    Escape("proc", "sysrq", _writes("/proc/sysrq-trigger")),
    Escape("proc", "memory of the kernel", _reads("/proc/kcore")),
    Escape(
        "proc",
        "other processes",
        """
import os
others = [name for name in os.listdir("/proc") if name.isdigit()]
print("ESCAPED" if set(others) - {"1", str(os.getpid())} else "kept in", others)
""",
    ),
    Escape(
        "proc",
        "overwrite the interpreter",
        """
import os, sys
for path in ("/proc/self/exe", sys.executable, os.__file__):
    try:
        os.close(os.open(path, os.O_WRONLY))
        print("ESCAPED", path)
    except OSError as error:
        print("kept in", error)
""",
    ),
    Escape(
        "proc",
        "spare itself from memory pressure",
        """
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
]

NEW_USER, NEW_NET, NEW_MOUNT = 0x10000000, 0x40000000, 0x00020000
NAMESPACES = [
    Escape(
        "namespaces",
        f"unshare {name}",
        _SYSCALL + f"\nresult = syscall(272, {flag})\nprint('ESCAPED' if result >= 0 else result)",
    )
    for name, flag in (("user", NEW_USER), ("net", NEW_NET), ("mount", NEW_MOUNT))
] + [
    Escape(
        "namespaces",
        "clone",
        _SYSCALL
        + f"""
result = syscall(56, {NEW_USER} | 17, 0, 0, 0, 0)
if result == 0:
    os._exit(0)
print("ESCAPED" if result > 0 else result)
""",
    ),
    Escape(
        "namespaces",
        "clone3",
        _SYSCALL
        + f"""
import struct
result = syscall(435, struct.pack("Q" * 8, {NEW_USER}, 0, 0, 0, 17, 0, 0, 0), 64)
if result == 0:
    os._exit(0)
print("ESCAPED" if result > 0 else result)
""",
    ),
    Escape(
        "namespaces",
        "enter the keeper's",
        _SYSCALL
        + """
for name in ("user", "mnt", "pid", "net"):
    try:
        fd = os.open(f"/proc/1/ns/{name}", os.O_RDONLY)
    except OSError as error:
        print("kept in", error)
        continue
    print("ESCAPED" if syscall(308, fd, 0) >= 0 else "kept in")
""",
    ),
    Escape(
        "namespaces",
        "mount",
        _SYSCALL
        + '\nresult = syscall(165, b"x", b"/tmp", b"tmpfs", 0, 0)'
        + "\nprint('ESCAPED' if result >= 0 else result)",
    ),
    Escape(
        "namespaces",
        "unmount",
        _SYSCALL
        + """
for place in (b"/tmp", b"/proc", b"/usr", b"/"):
    print("ESCAPED" if syscall(166, place, 2) >= 0 else "kept in")
""",
    ),
    Escape(
        "namespaces",
        "new mount calls",
        _SYSCALL
        + '\nresult = syscall(430, b"tmpfs", 0)\nprint("ESCAPED" if result >= 0 else result)',
    ),
]

KERNEL = [
    _call("io_uring", 425, 8, "b'\\0' * 120"),
    _call("bpf", 321, 0, "b'\\0' * 128", 128),
    _call("perf", 298, "b'\\0' * 128", 0, -1, -1, 0),
    _call("userfaultfd", 323, 1),
    _call("keys", 250, 0, -3, 1),
    _call("module", 313, 0, "b''", 0),
    _call("kexec", 246, 0, 0, 0, 0),
    _call("reboot", 169, 0xFEE1DEAD, 672274793, 0),
    _call("memory of another", 310, 1, 0, 0, 0, 0, 0),
    _call("descriptor of another", 438, 3, 0, 0),
    _call("handles of files", 304, -100, "b'\\0' * 128", 0),
    _call("watch all files", 300, 0, 0),
    _call("secret memory", 447, 0),
    _call("message queue", 240, "b'q'", 0o102, 0o600, 0),
    _call("a call of the future", 900),
    _call("x32", 0x40000000 + 39),
    Escape(
        "kernel",
        "calls of 32 bits",
        """
import ctypes, mmap
code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret
block = mmap.mmap(-1, 4096, prot=7)
block.write(code)
run = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(block)))
print("ESCAPED", run())
""",
        ("crashed",),
    ),
]

TIME = [
    Escape("time", "sleep", "import time\ntime.sleep(1e6)", ("timeout",)),
    Escape("time", "spin", "while True:\n    pass", ("timeout",)),
    Escape("time", "spin in C", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", ("timeout",)),
    Escape("time", "wait for input", "import os\nos.read(os.pipe()[0], 1)", ("timeout",)),
    Escape(
        "time",
        "threads after the end",
        """
import threading, time
threading.Thread(target=time.sleep, args=(1e6,)).start()
""",
        ("timeout",),
    ),
    Escape(
        "time",
        "exit handler",
        "import atexit, time\natexit.register(time.sleep, 1e6)",
        ("timeout",),
    ),
    Escape(
        "time",
        "spin in many processes",
        "import os\nfor _ in range(3):\n    os.fork()\nwhile True:\n    pass",
        ("timeout",),
    ),
    Escape(
        "time",
        "catch the end of CPU time",
        """
import signal
signal.signal(signal.SIGXCPU, lambda *_: print("on"))
while True:
    pass
""",
        ("timeout",),
    ),
    Escape(
        "time",
        "set the clock",
        """
import time
try:
    time.clock_settime(time.CLOCK_REALTIME, 0)
    print("ESCAPED")
except OSError as error:
    print("kept in", error)
""",
    ),
]

PROGRAMS = [
    *NETWORK,
    *FILESYSTEM,
    *PROCESSES,
    *MEMORY,
    *OUTPUT,
    *SIGNALS,
    *PROC,
    *NAMESPACES,
    *KERNEL,
    *TIME,
]
