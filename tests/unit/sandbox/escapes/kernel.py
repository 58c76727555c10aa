"""System calls that a jail does not have, and namespaces."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import SYSCALL, Escape, refused_call, tries

NEW_USER, NEW_NET, NEW_MOUNT = 0x10000000, 0x40000000, 0x00020000
NAMESPACES = [
    Escape(
        f"unshare {name}",
        SYSCALL + f"\nresult = syscall(272, {flag})\nprint('ESCAPED' if result >= 0 else result)",
    )
    for name, flag in (("user", NEW_USER), ("net", NEW_NET), ("mount", NEW_MOUNT))
] + [
    Escape(
        "clone",
        SYSCALL
        + f"""
result = syscall(56, {NEW_USER} | 17, 0, 0, 0, 0)
if result == 0:
    os._exit(0)
print("ESCAPED" if result > 0 else result)
""",
    ),
    Escape(
        "clone3",
        SYSCALL
        + f"""
import struct
result = syscall(435, struct.pack("Q" * 8, {NEW_USER}, 0, 0, 0, 17, 0, 0, 0), 64)
if result == 0:
    os._exit(0)
print("ESCAPED" if result > 0 else result)
""",
    ),
    Escape(
        "enter the keeper's",
        SYSCALL
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
        "mount",
        SYSCALL
        + '\nresult = syscall(165, b"x", b"/tmp", b"tmpfs", 0, 0)'
        + "\nprint('ESCAPED' if result >= 0 else result)",
    ),
    Escape(
        "unmount",
        SYSCALL
        + """
for place in (b"/tmp", b"/proc", b"/usr", b"/"):
    print("ESCAPED" if syscall(166, place, 2) >= 0 else "kept in")
""",
    ),
    Escape(
        "new mount calls",
        SYSCALL
        + '\nresult = syscall(430, b"tmpfs", 0)\nprint("ESCAPED" if result >= 0 else result)',
    ),
]

KERNEL = [
    refused_call("io_uring", 425, 8, "b'\\0' * 120"),
    refused_call("bpf", 321, 0, "b'\\0' * 128", 128),
    refused_call("perf", 298, "b'\\0' * 128", 0, -1, -1, 0),
    refused_call("userfaultfd", 323, 1),
    refused_call("keys", 250, 0, -3, 1),
    refused_call("module", 313, 0, "b''", 0),
    refused_call("kexec", 246, 0, 0, 0, 0),
    refused_call("reboot", 169, 0xFEE1DEAD, 672274793, 0),
    refused_call("memory of another", 310, 1, 0, 0, 0, 0, 0),
    refused_call("descriptor of another", 438, 3, 0, 0),
    refused_call("handles of files", 304, -100, "b'\\0' * 128", 0),
    refused_call("watch all files", 300, 0, 0),
    refused_call("secret memory", 447, 0),
    refused_call("message queue", 240, "b'q'", 0o102, 0o600, 0),
    refused_call("a call of the future", 900),
    refused_call("x32", 0x40000000 + 39),
    Escape(
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
    refused_call("requests to disks", 206, 64, "b'\\0' * 8"),
    refused_call("handle of the keeper", 434, 1, 0),
    refused_call("handle of itself", 434, "os.getpid()", 0),
    refused_call("addresses that are not random", 135, 0x0040000),
    refused_call("executable data", 135, 0x0400000),
    refused_call("advice to another", 440, 3, 0, 0, 0, 0),
    refused_call("memory of what has ended", 448, 3, 0),
    refused_call("comparison with the keeper", 312, 1, "os.getpid()", 0, 0, 0),
    refused_call("pages of the keeper", 279, 1, 0, 0, 0, 0, 0),
    refused_call("robust list of the keeper", 274, 1, "b'\\0' * 8", "b'\\0' * 8"),
    refused_call("ports", 172, 3),
    refused_call("the kernel's log", 103, 3, "b'\\0' * 64", 64),
    refused_call("a tree of mounts", 428, -100, "b'/'", 1),
    refused_call("list of mounts", 458, "b'\\0' * 64", "b'\\0' * 64", 8, 0),
    refused_call("pages in the cache", 451, 0, "b'\\0' * 16", "b'\\0' * 64", 0),
    refused_call("name of the host", 170, "b'mine'", 4),
    refused_call("accounts", 163, "b'/tmp/account'"),
    refused_call("another root", 155, "b'/tmp'", "b'/tmp'"),
    refused_call("local descriptor table", 154, 1, "b'\\0' * 16", 16),
    Escape(
        "calls that are younger than the list",
        SYSCALL
        + """
import errno
for number in (*range(337, 424), *range(463, 520)):  # 335 and 336 the kernel lets by all filters
    result = syscall(number, -1, -1, -1, -1, -1, -1)
    if result not in (-errno.ENOSYS, -errno.EPERM):
        print("ESCAPED", number, result)
""",
        ("ok",),
    ),
    Escape(
        "a filter above the filter",
        SYSCALL
        + """
import struct
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
print("nested", syscall(317, 1, 0, program))
print("ESCAPED" if syscall(272, 0x10000000) >= 0 or syscall(101, 0, 0, 0, 0) >= 0 else "kept in")
""",
        ("ok",),
    ),
    Escape(
        "a filter that asks a process of its own",
        SYSCALL
        + """
import struct
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FC00000))
program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
result = syscall(317, 1, 8, program)
os.write(1, b"ESCAPED" if result >= 0 else b"kept in")
""",
    ),
    Escape(
        "traces of siblings",
        SYSCALL
        + """
import time
child = os.fork()
if child == 0:
    time.sleep(5)
    os._exit(0)
for request in (16, 0x4206, 0):
    print("ESCAPED" if syscall(101, request, child, 0, 0) >= 0 else "kept in")
print("ESCAPED" if syscall(310, child, b"", 0, b"", 0, 0) >= 0 else "kept in")
os.kill(child, 9)
""",
        ("ok",),
    ),
    Escape(
        "flags of shared files",
        tries(
            "fcntl.ioctl(fd, 0x40086602, struct.pack('l', 0x10))",
            "fcntl.ioctl(fd, 0x5412, b'x')",
            "fcntl.ioctl(fd, 0x40049409, 0)",
            setup="import fcntl, struct\nfd = os.open(os.__file__, os.O_RDONLY)\n",
        ),
    ),
]
