"""Jails of different calls that would talk to each other, or spoil what both draw from.

Words of 24 bits: where a channel carries only that something is so, one place of many stands for
each bit.
"""

from __future__ import annotations

from tests.unit.sandbox.escapes.program import NAME, SECRET, SENT, SYSCALL, Pair

START = f"""
import ctypes, fcntl, glob, os, signal, socket, struct, sys, time
secret = 0x{SECRET}
bits = [i for i in range(24) if secret >> i & 1]
def sent():
    print("{SENT}", flush=True)
def by_all(act):
    reading, writing = os.pipe()
    for _ in range(4):
        if os.fork() == 0:
            act()
            os.write(writing, b".")
            time.sleep(60)
            os._exit(0)
    for _ in range(4):
        os.read(reading, 1)
def on(act=lambda: None):
    sent()
    while True:
        act()
        time.sleep(0.002)
"""
SHARED = """
import encodings, os
folder = os.path.dirname(encodings.__file__)
places = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name[-3:] == ".py"]
places = places[{0}:{0} + {1}]  # others for each pair, as several are at work at once
shared = [os.open(path, os.O_RDONLY) for path in places]
"""
LISTEN = f"""
import ctypes, fcntl, glob, os, signal, socket, struct, sys, time
def told(bits):
    print("heard %06x" % sum(1 << i for i in set(bits)))
name = "{NAME}"
key = int("{NAME}"[-6:], 16)
"""
NAMED = f'name = "{NAME}"\nkey = int("{NAME}"[-6:], 16)\n'
LOCK = "struct.pack('hhqqi4x', {}, 0, {}, 1, 0)"  # struct flock of 64 bits: type, from, length
DISSOLVE = "libc.connect(one.fileno(), struct.pack('H', 0), 2)"  # a pair's end without its peer


def _hears_lock(command: str, place: int) -> str:
    return (
        LISTEN
        + SHARED.format(place, 1)
        + f"""
held = []
for i in range(24):
    answer = fcntl.fcntl(shared[0], {command}, {LOCK.format("fcntl.F_WRLCK", "i")})
    if struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK:
        held.append(i)
told(held)
"""
    )


def _locks(command: str, place: int) -> str:
    return (
        START
        + SHARED.format(place, 1)
        + f"""
for i in bits:
    fcntl.fcntl(shared[0], {command}, {LOCK.format("fcntl.F_RDLCK", "i")})
on()
"""
    )


CHANNELS = [
    Pair(
        "datagrams to a name of no file",
        START
        + NAMED
        + f"""
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def act():
    try:
        one.sendto(b"{SECRET}", "\\0" + name)
    except OSError:
        pass
on(act)
""",
        LISTEN
        + SYSCALL
        + f"""
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.bind("\\0" + name)
{DISSOLVE}
one.settimeout(0.5)
print("heard", one.recv(64))
""",
    ),
    Pair(
        "datagrams to a name that the kernel gave",
        START
        + f"""
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def act():
    for line in open("/proc/net/unix"):
        if "@" in line:
            try:
                one.sendto(b"{SECRET}", "\\0" + line.split("@")[1].strip())
            except OSError:
                pass
on(act)
""",
        LISTEN
        + SYSCALL
        + f"""
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
libc.bind(one.fileno(), struct.pack("H", 1), 2)
{DISSOLVE}
one.settimeout(0.5)
print("heard", one.recv(64))
""",
    ),
    Pair(
        "sockets with a name in a directory",
        START
        + NAMED
        + f"""
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def act():
    for place in ("/tmp", "/dev/shm", "/var/tmp", "/run"):
        try:
            one.sendto(b"{SECRET}", place + "/" + name)
        except OSError:
            pass
on(act)
""",
        LISTEN
        + SYSCALL
        + f"""
for place in ("/tmp", "/dev/shm", "/var/tmp", "/run"):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        one.bind(place + "/" + name)
        {DISSOLVE}
        one.settimeout(0.2)
        print("heard", one.recv(64))
    except OSError as error:
        print("kept in", error)
""",
    ),
    Pair(
        "locks of shared files",
        START
        + SHARED.format(0, 24)
        + "for i in bits:\n    fcntl.flock(shared[i], fcntl.LOCK_SH)\non()",
        LISTEN
        + SHARED.format(0, 24)
        + """
held = []
for i, fd in enumerate(shared):
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.append(i)
told(held)
""",
    ),
    Pair(
        "locks of parts of a shared file",
        _locks("fcntl.F_SETLK", 72),
        _hears_lock("fcntl.F_GETLK", 72),
    ),
    Pair("locks of a shared file's openings", _locks("37", 73), _hears_lock("36", 73)),
    Pair(
        "locks of a device",
        START
        + f"""
null = os.open("/dev/null", os.O_RDWR)
for i in bits:
    fcntl.fcntl(null, fcntl.F_SETLK, {LOCK.format("fcntl.F_WRLCK", "i")})
on()
""",
        LISTEN
        + f"""
null = os.open("/dev/null", os.O_RDWR)
held = []
for i in range(24):
    try:
        fcntl.fcntl(null, fcntl.F_SETLK, {LOCK.format("fcntl.F_WRLCK", "i")})
    except (BlockingIOError, PermissionError):
        held.append(i)
told(held)
""",
    ),
    Pair(
        "times of a device",
        START
        + """
try:
    os.utime("/dev/null", (secret, secret))
except OSError:
    pass
on()
""",
        LISTEN + 'print("heard %06x" % int(os.stat("/dev/null").st_mtime))',
    ),
    Pair(
        "leases of shared files",
        START
        + SHARED.format(24, 24)
        + "for i in bits:\n    fcntl.fcntl(shared[i], 1024, fcntl.F_RDLCK)\non()",
        LISTEN
        + SHARED.format(24, 24)
        + """
held = []
for i, fd in enumerate(shared):
    try:
        fcntl.fcntl(fd, 1024, fcntl.F_WRLCK)
    except BlockingIOError:
        held.append(i)
told(held)
""",
    ),
    Pair(
        "watches of shared files",
        START
        + SHARED.format(48, 24)
        + "on(lambda: [os.close(os.open(places[i], os.O_RDONLY)) for i in bits])",
        LISTEN
        + SHARED.format(48, 24)
        + SYSCALL
        + """
fd = called(294, os.O_NONBLOCK)
numbers = {called(254, fd, places[i].encode(), 0x20): i for i in range(24)}  # IN_OPEN
seen = set()
until = time.monotonic() + 0.3
while time.monotonic() < until:
    try:
        record = os.read(fd, 1 << 16)
    except BlockingIOError:
        time.sleep(0.005)
        continue
    while record:
        number, _, _, length = struct.unpack("iIII", record[:16])
        seen.add(numbers[number])
        record = record[16 + length:]
told(seen)
""",
    ),
    Pair(
        "signals from shared directories",
        START
        + """
folders = sorted(e.path for e in os.scandir(os.path.dirname(os.__file__)) if e.is_dir())[:24]
on(lambda: [os.listdir(folders[i]) for i in bits])
""",
        LISTEN
        + """
folders = sorted(e.path for e in os.scandir(os.path.dirname(os.__file__)) if e.is_dir())[:24]
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 60))
for i, folder in enumerate(folders):
    fd = os.open(folder, os.O_RDONLY)
    fcntl.fcntl(fd, 10, 35 + i)
    fcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_MULTISHOT)
seen = set()
until = time.monotonic() + 0.3
while time.monotonic() < until:
    found = signal.sigtimedwait(range(34, 60), 0.05)
    if found:
        seen.add(found.si_signo - 35)
told(seen)
""",
    ),
    Pair(
        "files in places that others have",
        START
        + NAMED
        + f"""
for place in ("/tmp", "/dev/shm", "/var/tmp", "/run", "/run/lock", "/dev/mqueue", "/run/meshrl"):
    try:
        with open(place + "/" + name, "w") as file:
            file.write("{SECRET}")
        os.chmod(place + "/" + name, 0o666)
    except OSError:
        pass
on()
""",
        LISTEN
        + """
folders = ("/tmp", "/dev/shm", "/var/tmp", "/run", "/run/lock", "/dev/mqueue", "/run/meshrl")
for place in [f"{folder}/{name}" for folder in folders] + glob.glob("/tmp/*/*"):
    try:
        print("heard", open(place).read(64))
    except OSError as error:
        print("kept in", error)
""",
    ),
    Pair(
        "what proc shows of others",
        START
        + f"""
reading, writing = os.pipe()
os.write(writing, b"{SECRET}" * 100)
fd = os.memfd_create("{SECRET}")
os.write(fd, b"{SECRET}")
if os.fork() == 0:
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c",
        "import time; time.sleep(60)", "{SECRET}"], {{"word": "{SECRET}"}})
on()
""",
        LISTEN
        + """
for path in glob.glob("/proc/[0-9]*/*") + glob.glob("/proc/[0-9]*/fd/*"):
    if path.startswith((f"/proc/{os.getpid()}/", "/proc/1/task")):
        continue
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        print(path, os.read(fd, 512), os.readlink(path))
    except OSError:
        pass
""",
    ),
    Pair(
        "numbers of processes and what they are set to",
        START
        + SYSCALL
        + """
digits = [secret >> 3 * i & 7 for i in range(8)]
for digit in digits:
    if os.fork() == 0:
        called(251, 1, 0, 2 << 13 | digit)
        time.sleep(60)
        os._exit(0)
on()
""",
        LISTEN
        + SYSCALL
        + """
found = []
for number in range(max(1, os.getpid() - 300), os.getpid() + 8):
    level = syscall(252, 1, number)
    if level >= 0 and level >> 13 == 2 and number != os.getpid():
        found.append(level & 7)
for start in range(len(found) - 7):
    told(3 * i + b for i in range(8) for b in range(3) if found[start + i] >> b & 1)
""",
    ),
    Pair(
        "shared segments",
        START
        + NAMED
        + SYSCALL
        + f"""
segment = called(29, key, 4096, 0o1666)
libc.shmat.restype = ctypes.c_void_p
ctypes.memmove(libc.shmat(segment, None, 0), b"{SECRET}", 6)
on()
""",
        LISTEN
        + SYSCALL
        + """
segment = called(29, key, 4096, 0o666)
libc.shmat.restype = ctypes.c_void_p
print("heard", ctypes.string_at(libc.shmat(segment, None, 0), 6))
""",
    ),
    Pair(
        "semaphores",
        START
        + NAMED
        + SYSCALL
        + """
group = called(64, key, 24, 0o1666)
for i in bits:
    called(66, group, i, 16, 1)  # SETVAL
on()
""",
        LISTEN
        + SYSCALL
        + """
group = called(64, key, 24, 0o666)
told(i for i in range(24) if called(66, group, i, 12, 0))  # GETVAL
""",
    ),
    Pair(
        "message queues",
        START
        + NAMED
        + SYSCALL
        + f"""
queue = called(68, key, 0o1666)
on(lambda: called(69, queue, struct.pack("q", 1) + b"{SECRET}", 6, 0o4000))
""",
        LISTEN
        + SYSCALL
        + """
room = ctypes.create_string_buffer(64)
print(called(70, called(68, key, 0o666), room, 32, 0, 0o4000), "heard", room.raw[8:14])
""",
    ),
    Pair(
        "named message queues",
        START
        + NAMED
        + SYSCALL
        + f"""
queue = called(240, name.encode(), 0o102, 0o666, struct.pack("qqqq32x", 0, 8, 64, 0))
called(242, queue, b"{SECRET}", 6, 0, 0)
on()
""",
        LISTEN
        + SYSCALL
        + """
room = ctypes.create_string_buffer(64)
queue = called(240, name.encode(), os.O_RDWR | os.O_NONBLOCK, 0, 0)
print(called(243, queue, room, 64, 0, 0), "heard", room.raw[:6])
""",
    ),
    Pair(
        "keys of the user",
        START + NAMED + SYSCALL + f'called(248, b"user", name.encode(), b"{SECRET}", 6, -4)\non()',
        LISTEN
        + SYSCALL
        + """
room = ctypes.create_string_buffer(64)
found = called(250, 10, -4, b"user", name.encode(), 0)
print(called(250, 11, found, room, 64), "heard", room.raw[:6])
""",
    ),
    Pair(
        "room in pipes",
        START
        + """
kept = []
def fill():
    try:
        while True:
            kept.append(os.pipe())
            fcntl.fcntl(kept[-1][1], 1031, 1 << 20)  # F_SETPIPE_SZ
    except OSError:
        pass
by_all(fill)
on()
""",
        LISTEN
        + """
kept = [os.pipe() for _ in range(4)]
sizes = {fcntl.fcntl(writing, 1032) for _, writing in kept}
print("ESCAPED" if min(sizes) < 65536 else "enough", sizes)
""",
    ),
    Pair(
        "signals that wait",
        START
        + """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))
libc = ctypes.CDLL(None, use_errno=True)
while libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0:
    pass
on()
""",
        LISTEN
        + """
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))
libc = ctypes.CDLL(None, use_errno=True)
done = libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0
print("enough" if done or ctypes.get_errno() != 11 else "ESCAPED")
""",
    ),
    Pair(
        "watches that are left",
        START
        + SYSCALL
        + """
def fill():
    while syscall(294, 0) >= 0:
        pass
by_all(fill)
on()
""",
        LISTEN + SYSCALL + 'print("ESCAPED" if syscall(294, 0) == -24 else "enough")',
    ),
    Pair(
        "requests to disks that are left",
        START
        + SYSCALL
        + """
room = ctypes.c_long(0)
while True:
    room.value = 0
    if syscall(206, 4096, ctypes.byref(room)) < 0:
        break
on()
""",
        LISTEN
        + SYSCALL
        + """
room = ctypes.c_long(0)
print("ESCAPED" if syscall(206, 64, ctypes.byref(room)) in (0, -11) else "enough")
""",
    ),
    Pair(
        "descriptors on their way",
        START
        + """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
one.setblocking(False)
try:
    while True:
        socket.send_fds(one, [b"x"], [0] * 253)
except OSError:
    pass
on()
""",
        LISTEN
        + """
one, other = socket.socketpair()
try:
    socket.send_fds(one, [b"x"], [0])
    print("enough")
except OSError as error:
    print("ESCAPED" if error.errno == 109 else "enough", error)
""",
    ),
    Pair(
        "pages that are in memory",
        START
        + SHARED.format(80, 24)
        + """
def act():
    for i, fd in enumerate(shared):
        if i in bits:
            os.pread(fd, 1, 0)
        else:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
act()
on(act)
""",
        LISTEN
        + SHARED.format(80, 24)
        + """
seen = []
for i, fd in enumerate(shared):
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
        seen.append(i)
    except BlockingIOError:
        pass
told(seen)
""",
    ),
]
