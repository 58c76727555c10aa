"""Files outside, devices, what `/proc` holds, and a scratch directory that is to be full."""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import (
    CANARY,
    OWN,
    SPENT,
    SYSCALL,
    Escape,
    reads,
    tries,
    writes,
)

FILESYSTEM = [
    Escape("read a file of the host", reads(CANARY)),
    Escape("write a file of the host", writes(CANARY)),
    Escape("write below usr", writes("/usr/bin/planted")),
    Escape("write below etc", writes("/etc/passwd")),
    Escape("write at the root", writes("/planted")),
    Escape("write a device", writes("/dev/planted")),
    Escape("read passwords", reads("/etc/shadow")),
    Escape("read the kernel's log", reads("/dev/kmsg")),
    Escape(
        "read home",
        "import os\nprint(os.listdir('/root'), os.listdir('/home'), 'ESCAPED')",
    ),
    Escape(
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
        "open everything",
        "files = [open('/dev/null') for _ in range(100_000)]\nprint('ESCAPED')",
        SPENT,
    ),
]

PROC = [
    Escape("memory of the keeper", reads("/proc/1/mem")),
    Escape("surroundings of the keeper", reads("/proc/1/environ")),
    Escape(
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
    Escape("root of the keeper", "import os\nprint(os.listdir('/proc/1/root'), 'ESCAPED')"),
    Escape("settings of the kernel", writes("/proc/sys/kernel/core_pattern")),
    Escape("host name", writes("/proc/sys/kernel/hostname")),
    Escape("more namespaces", writes("/proc/sys/user/max_user_namespaces")),
    Escape("sysrq", writes("/proc/sysrq-trigger")),
    Escape("memory of the kernel", reads("/proc/kcore")),
    Escape(
        "other processes",
        """
import os
others = [name for name in os.listdir("/proc") if name.isdigit()]
print("ESCAPED" if set(others) - {"1", str(os.getpid())} else "kept in", others)
""",
    ),
    Escape(
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
    Escape(
        "pressure of the host",
        tries(
            *(
                f"os.write(os.open('/proc/pressure/{name}', os.O_RDWR), b'some 500000 2000000')"
                for name in ("cpu", "memory", "io")
            )
        ),
    ),
    Escape(
        "every setting of the kernel",
        """
import os
own = {"self", "thread-self", "pressure"}
for folder, folders, names in os.walk("/proc"):
    folders[:] = [name for name in folders if not name.isdigit() and name not in own]
    for name in names:
        try:
            fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_NONBLOCK)
            os.write(fd, os.pread(fd, 4096, 0))
            print("ESCAPED", folder, name)
        except OSError:
            pass
""",
        ("ok",),
    ),
    Escape(
        "control groups",
        """
import os
places = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"]
try:
    for line in open("/proc/self/cgroup"):
        path = line.strip().split(":", 2)[2]
        places += [place + path for place in places[:3]]
except OSError as error:
    print("kept in", error)
for place in places:
    for name in ("cgroup.procs", "tasks", "memory.max", "pids.max", "memory.limit_in_bytes"):
        try:
            os.close(os.open(f"{place}/{name}", os.O_WRONLY))
            print("ESCAPED", place, name)
        except OSError:
            pass
""",
        ("ok",),
    ),
    Escape(
        "devices of the host",
        """
import os
names = "mem kmem port kmsg ptmx tty tty0 console fuse kvm net/tun loop-control vhost-net hpet sda"
names += " vda nvme0n1 mapper/control userfaultfd vfio/vfio uinput rfkill nvidia0 dri/card0 rtc"
names += " snd/seq watchdog cpu/0/msr bus/usb/001/001 hwrng snapshot autofs btrfs-control"
for name in names.split():
    try:
        os.close(os.open(f"/dev/{name}", os.O_RDONLY | os.O_NONBLOCK))
        print("ESCAPED", name)
    except OSError:
        pass
try:
    known = {"null", "zero", "full", "random", "urandom", "fd", "shm", "stdin", "stdout", "stderr"}
    print("ESCAPED" if set(os.listdir("/dev")) - known else "kept in")
except OSError as error:
    print("kept in", error)
""",
        ("ok",),
    ),
    Escape(
        "attributes of the user's files",
        tries(
            "os.chmod(own, 0o777)",
            "os.utime(own, (1, 1))",
            "os.setxattr(own, 'user.x', b'y')",
            "os.chown(own, -1, os.getgid())",
            "os.truncate(own, 0)",
            "os.rename(own, own + '2')",
            "os.link(own, '/tmp/own')",
            "os.unlink(own)",
            setup=f"own = {OWN!r}\n",
        ),
    ),
    Escape(
        "watch a file of the host",
        tries(
            f"called(254, fd, {CANARY!r}.encode(), 0x20)",
            setup=SYSCALL + "fd = called(294, 0) if syscall(294, 0) >= 0 else -1\n",
        ),
    ),
    Escape(
        "change what is shared",
        tries(
            "os.chmod(path, 0o777)",
            "os.utime(path)",
            "os.setxattr(path, 'user.x', b'y')",
            "os.link(path, '/tmp/link') or open('/tmp/link', 'a')",
            "os.rename(path, '/tmp/moved')",
            "os.unlink(path)",
            "os.truncate(path, 0)",
            "os.mkdir(os.path.join(os.path.dirname(path), 'planted'))",
            "os.open(os.path.dirname(path), os.O_TMPFILE | os.O_WRONLY)",
            "os.link(f'/proc/self/fd/{os.open(path, os.O_RDONLY)}', '/tmp/second')",
            setup="path = os.__file__\n",
        ),
    ),
    Escape(
        "more than the scratch holds at once",
        tries(
            "os.posix_fallocate(fd, 0, 1 << 30)",
            "os.truncate('/tmp/hole', 1 << 30) or os.pwrite(fd, b'x', 1 << 30)",
            "os.copy_file_range(source, fd, 1 << 30, 0, 1 << 30)",
            setup="""
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
fd = os.open("/tmp/hole", os.O_CREAT | os.O_RDWR)
source = os.open(os.__file__, os.O_RDONLY)
""",
        ),
    ),
    Escape(
        "what is hard to clear away",
        f"""
import os
os.symlink(os.path.dirname({CANARY!r}), "outside")
os.makedirs("closed/within")
open("closed/within/file", "w").close()
for name in (b"\\xff\\xfe", b"line\\nbreak", b"-rf", b"*"):
    open(name, "w").close()
os.mkdir("deep")
fd = os.open("deep", os.O_RDONLY)
for _ in range(300):
    os.mkdir("d", dir_fd=fd)
    below = os.open("d", os.O_RDONLY, dir_fd=fd)
    os.close(fd)
    fd = below
os.chmod("closed/within", 0)
os.chmod("closed", 0)
os.chmod(".", 0)
""",
    ),
    Escape(
        "descriptors that nobody gave",
        """
import os
for fd in range(3, 1024):
    try:
        os.fstat(fd)
        print("ESCAPED", fd, os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
""",
    ),
]
