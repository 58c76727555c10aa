"""First code of every process that a Host executes.

It ties the process to its parent, closes its files to other users, then runs the program in its
place.

`python -m meshrl.common.mesh.process.entry.child parent=PID death=FD nice=N rlimit=AS:BYTES --
module:NAME ARGS...` runs a Python module in this same interpreter, which saves a second one. `--
exec:PROGRAM ARGS...` replaces the interpreter, and needs only this file. The parent forks without
running Python code in the child (a `preexec_fn` would, next to ZeroMQ's and our own threads). A
program dies with the spawning thread of its parent, a module also when the parent's death pipe
closes. `guard=FD` comes first, in place of `parent`: FD is the death pipe (`guard.py`).

The module imports little, and only from the standard library: its imports delay the start of every
process.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing `typing` and `signal` would take longer than all other imports
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

CHANNEL_FD = "MESHRL_CHANNEL_FD"
MAX_FRAME_BYTES = 64 << 20  # a longer length prefix means a corrupt stream
PR_SET_PDEATHSIG = 1
SIGKILL = 9
PRIVATE_UMASK = 0o077  # umask of every process of a mesh: only its user may read its files
RESERVE_BYTES = 64 << 20  # of address space, for the modules that report an error
ORPHANED_EXIT_STATUS = 71  # exit status of a child whose parent exited before the tie


def tie_to_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent's spawning thread ends; now if it has
    ended.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(ORPHANED_EXIT_STATUS)


def die_with_pipe(death_fd: int) -> int:
    """Make the kernel kill this process, even a stopped one, when the owner's end of the pipe
    closes.

    Only the owner has the write end. If it is closed already, the process exits now. The tie lasts
    while the returned descriptor is open; `death_fd` is closed. The signal of a descriptor belongs
    to its open file, which all processes that inherited it share. So this opens the pipe again.
    """
    import fcntl
    import select

    own = os.open(f"/proc/self/fd/{death_fd}", os.O_RDONLY | os.O_NONBLOCK)
    os.close(death_fd)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(own, 0)  # only its end
    if poll.poll(0):
        os._exit(ORPHANED_EXIT_STATUS)
    return own


def start_guard(owner: int) -> None:
    """Insert a guard between the parent and this process, which continues in a fork; see
    `guard`.
    """
    own = os.path.realpath(__file__)
    for _ in range(5):
        own = os.path.dirname(own)
    sys.path.append(own)  # for programs, which start without a path to our modules
    from meshrl.common.mesh.process.entry import guard

    sys.path.remove(own)
    writing = guard.fork_guarded(owner, 1)
    for number in (1, 2):
        os.dup2(writing, number)
    os.close(writing)


def set_rlimit(spec: str) -> None:
    """Set one resource limit of this process, soft and hard, from NAME:VALUE, up to its hard
    limit.
    """
    import resource

    name, value = spec.split(":")
    which: int = getattr(resource, f"RLIMIT_{name}")
    _, hard = resource.getrlimit(which)
    ceiling = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
    resource.setrlimit(which, (ceiling, ceiling))


def reserve_headroom() -> Callable[[], None]:
    """Reserve a descriptor and address space; return a function that releases them.

    A process that reaches a limit of the host needs both to write its failure. Address space is
    reserved only where it is limited.
    """
    import mmap
    import resource

    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    space = mmap.mmap(-1, RESERVE_BYTES, prot=mmap.PROT_READ) if limited else None

    def give() -> None:
        if space is not None:
            space.close()
        try:
            os.close(0)  # stdin is no longer read
        except OSError:
            return

    return give


class ChildChannel:
    """Child's end of the socket pair to its parent: blocking, length-prefixed frames."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._buffer = bytearray()

    @classmethod
    def from_env(cls) -> ChildChannel:
        """Return the channel that `Host.spawn` opened with `has_channel`; raise KeyError if it
        opened none.
        """
        import socket

        return cls(socket.socket(fileno=int(os.environ.pop(CHANNEL_FD))))

    def send(self, frame: bytes) -> None:
        """Send one frame; block until the parent has buffer space."""
        self._stream.sendall(len(frame).to_bytes(4, "little") + frame)

    def recv(self) -> bytes | None:
        """Receive the next frame; None if the parent has closed its end."""
        while True:
            frame = take_frame(self._buffer)
            if frame is not None:
                return frame
            more = self._stream.recv(1 << 16)
            if not more:
                return None
            self._buffer += more

    def move_above(self, lowest_fd: int) -> None:
        """Move the descriptor above `lowest_fd`, away from code that writes to small numbers by
        mistake.
        """
        import fcntl
        import socket

        moved = fcntl.fcntl(self._stream.fileno(), fcntl.F_DUPFD_CLOEXEC, lowest_fd)
        self._stream.close()
        self._stream = socket.socket(fileno=moved)


def take_frame(buffer: bytearray) -> bytes | None:
    """Remove the first complete frame from `buffer`; raise ValueError for an impossible length."""
    if len(buffer) < 4:
        return None
    length = int.from_bytes(buffer[:4], "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame has {length} bytes; the limit is {MAX_FRAME_BYTES}")
    if len(buffer) < 4 + length:
        return None
    frame = bytes(buffer[4 : 4 + length])
    del buffer[: 4 + length]
    return frame


OPTIONS: dict[str, Callable[[str], object]] = {
    "guard": lambda owner: start_guard(int(owner)),
    "parent": lambda parent: tie_to_parent(int(parent)),
    "death": lambda descriptor: die_with_pipe(int(descriptor)),
    "nice": lambda more: os.nice(int(more)),
    "rlimit": set_rlimit,
}


def main(argv: list[str]) -> None:
    """Apply the options before `--`, then run the program after it. Raises SystemExit for an
    unknown option.
    """
    os.umask(PRIVATE_UMASK)
    split = argv.index("--")
    program, arguments = argv[split + 1], argv[split + 2 :]
    for option in argv[:split]:
        key, value = option.split("=", 1)
        if key not in OPTIONS:
            raise SystemExit(f"meshrl.common.mesh.process.entry.child: unknown option {option!r}")
        OPTIONS[key](value)
    kind, _, name = program.partition(":")
    if kind == "exec":
        os.execvp(name, [name, *arguments])
    import runpy

    from meshrl.common.mesh.process.output.streams import install_lossy_output

    install_lossy_output()
    sys.argv = [name, *arguments]
    reserve = reserve_headroom()
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except BaseException as error:
        reserve()
        from meshrl.common.mesh.process.diagnosis import failure

        failure.write_failure(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
