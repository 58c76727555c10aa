"""Policy of the seccomp filter of jails: allowed calls, and the answers to all others.

The allowed calls were measured: those of CPython's standard library, bash, coreutils and the usual
Unix tools, pytest and numpy (`loadtests.system_calls` measures again). All others are denied.
Denied calls that honest programs make and can do without are answered at once. Any other is
reported to the jail's init process, so that the outcome names it.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from . import syscalls

ALLOWED_CALLS = """
read write close lseek pread64 pwrite64 readv writev preadv pwritev pwritev2 sendfile
copy_file_range open openat creat stat fstat lstat newfstatat statx access faccessat faccessat2
readlink readlinkat getdents getdents64 getcwd chdir fchdir statfs fstatfs truncate ftruncate
fallocate fsync fdatasync dup dup2 dup3 pipe pipe2 close_range umask
rename renameat renameat2 mkdir mkdirat rmdir link linkat unlink unlinkat symlink symlinkat
mknod mknodat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat
utimensat getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
mmap mprotect munmap mremap msync madvise brk
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
fork vfork execve exit exit_group wait4 waitid kill tkill tgkill
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
pause restart_syscall
getpid getppid gettid getpgid getpgrp getsid getuid geteuid getgid getegid getresuid getresgid
getgroups capget
futex set_robust_list set_tid_address rseq arch_prctl getcpu sched_yield sched_getaffinity
sched_getscheduler sched_getparam sched_getattr sched_get_priority_max sched_get_priority_min
sched_rr_get_interval getpriority
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getitimer setitimer
alarm timer_create timer_settime timer_gettime timer_getoverrun timer_delete
getrlimit setrlimit getrusage uname sysinfo getrandom
shutdown getsockname getpeername getsockopt
"""

# Honest programs make these calls, and can do without.
FIXED_ERRORS = {
    # As an older kernel answers: the C library then makes an older call.
    errno.ENOSYS: """
clone3 execveat openat2 pidfd_open pidfd_send_signal mincore cachestat membarrier process_madvise
futex_waitv futex_wake futex_wait futex_requeue pkey_alloc pkey_free pkey_mprotect map_shadow_stack
mseal lsm_get_self_attr lsm_set_self_attr lsm_list_modules landlock_create_ruleset landlock_add_rule
landlock_restrict_self readahead
""",
    # As a file system without extended attributes answers: `cp -a` and shutil.copystat go on.
    errno.EOPNOTSUPP: "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr",
    errno.EINVAL: "splice tee vmsplice",  # as for a file that cannot: `cat`, `cp` copy
    # Numeric libraries would place their memory, and cryptographic ones lock it.
    errno.EPERM: """
get_mempolicy mbind set_mempolicy mlock mlock2 mlockall munlock munlockall capset
""",
    # Success without an effect: the disks would be the host's, and locks of files that jails share
    # would be a channel between them. Only the jail itself opens its own files.
    0: "sync flock",
}

AF_UNIX = 1
SOCK_STREAM, SOCK_TYPES, SOCK_NONBLOCK = 1, 0xF, 0o4000
MSG_OOB = 1
SOL_SOCKET = 1
SO_REUSEADDR, SO_SNDBUF, SO_RCVBUF, SO_KEEPALIVE, SO_LINGER = 2, 7, 8, 9, 13
QUERY_PERSONALITY = 0xFFFFFFFF
PRIO_PROCESS = 0
INIT_PID = 1  # its process number where a jail has a namespace for processes

NEW_NAMESPACES = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWCGROUP | syscalls.CLONE_NEWUTS
NEW_NAMESPACES |= syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID
NEW_NAMESPACES |= syscalls.CLONE_NEWNET  # NEWTIME is a bit of the signal's number, not tested here

# linux/fcntl.h: duplicate, flags, sizes of pipes, seals. Not leases; notifications; owners, to whom
# signals go. Locks are granted without effect: F_SETLK, F_SETLKW, F_OFD_SETLK and F_OFD_SETLKW.
F_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032, 1033, 1034)
F_LOCKS = (6, 7, 37, 38)
F_GETLK, F_OFD_GETLK = 5, 36
F_SETPIPE_SZ = 1031  # all pipes of a user share one quota
MFD_HUGETLB = 4  # pages from a pool of the host's, which memory control groups do not count
# Others of its host could see what a program reads of a shared file, and drops from memory.
POSIX_FADV_DONTNEED, RWF_NOWAIT = 4, 8
# asm-generic/ioctls.h: FIONREAD,
# FIONBIO, FIOCLEX and FIONCLEX; linux/seccomp.h: operations of init on its listener.
SECCOMP_NOTIF_RECV, SECCOMP_NOTIF_SEND = 0xC0502100, 0xC0182101
IOCTLS = (0x541B, 0x5421, 0x5450, 0x5451, SECCOMP_NOTIF_RECV, SECCOMP_NOTIF_SEND)
# linux/prctl.h: death signal, dumpable, name, timer slack, the bounding set, seccomp's state,
# subreaper, no new privileges, huge pages.
PRCTLS = (1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 41, 42)


@dataclass(frozen=True)
class ArgumentTest:
    """Test of an argument's low word, masked by `mask`: one of `values`, or none of them."""

    argument_index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    negated: bool = False


@dataclass(frozen=True)
class SyscallRule:
    """Rule that answers the call with `error` where all tests hold; None: the call is allowed."""

    tests: tuple[ArgumentTest, ...]
    error: int | None = None


@dataclass(frozen=True, eq=False)  # hashed by identity: it is looked up for each jail
class SyscallPolicy:
    """Allowed calls, answered calls, and for others the first rule that matches.

    All remaining calls are denied with EPERM, and reported to a listener if there is one.
    """

    allowed_calls: frozenset[str]
    fixed_errors: tuple[tuple[str, int], ...]
    rules: tuple[tuple[str, tuple[SyscallRule, ...]], ...]


def allow_if(*tests: ArgumentTest) -> tuple[SyscallRule, ...]:
    return (SyscallRule(tests),)


def _build_rules(own_pid_test: ArgumentTest) -> dict[str, tuple[SyscallRule, ...]]:
    """Build the rules; `own_pid_test` holds if the first argument is the jail's own pid."""
    not_urgent = ArgumentTest(3, (0,), MSG_OOB), ArgumentTest(2, (0,), MSG_OOB)
    return {
        "clone": allow_if(ArgumentTest(0, (0,), NEW_NAMESPACES)),
        "fcntl": (
            SyscallRule((ArgumentTest(1, F_COMMANDS),)),
            SyscallRule((ArgumentTest(1, F_LOCKS),), 0),
            SyscallRule((ArgumentTest(1, (F_GETLK, F_OFD_GETLK)),), errno.EINVAL),
            SyscallRule((ArgumentTest(1, (F_SETPIPE_SZ,)),), errno.EPERM),
        ),
        "fadvise64": (SyscallRule((ArgumentTest(3, (POSIX_FADV_DONTNEED,)),), 0), SyscallRule(())),
        "ioctl": (SyscallRule((ArgumentTest(1, IOCTLS),)), SyscallRule((), errno.ENOTTY)),
        "personality": allow_if(ArgumentTest(0, (QUERY_PERSONALITY,))),
        "prctl": (SyscallRule((ArgumentTest(0, PRCTLS),)), SyscallRule((), errno.EINVAL)),
        "preadv2": (
            SyscallRule((ArgumentTest(5, (RWF_NOWAIT,), RWF_NOWAIT),), errno.EOPNOTSUPP),
            SyscallRule(()),
        ),
        "prlimit64": allow_if(own_pid_test),
        "recvfrom": allow_if(not_urgent[0]),
        "recvmsg": allow_if(not_urgent[1]),
        "sched_setaffinity": allow_if(own_pid_test),
        "sendto": allow_if(not_urgent[0]),
        "setpriority": allow_if(ArgumentTest(0, (PRIO_PROCESS,)), ArgumentTest(1, (0,))),
        "setsockopt": allow_if(
            ArgumentTest(1, (SOL_SOCKET,)),
            ArgumentTest(2, (SO_REUSEADDR, SO_SNDBUF, SO_RCVBUF, SO_KEEPALIVE, SO_LINGER)),
        ),
        # The C library connects to nscd so whenever it looks up a user's name.
        "socket": (
            SyscallRule(
                (ArgumentTest(0, (AF_UNIX,)), ArgumentTest(1, (SOCK_NONBLOCK,), SOCK_NONBLOCK)),
                errno.EPERM,
            ),
        ),
        # Pairs of streams only: datagrams can be sent to other jails' names.
        "socketpair": allow_if(
            ArgumentTest(0, (AF_UNIX,)), ArgumentTest(1, (SOCK_STREAM,), SOCK_TYPES)
        ),
    }


FIXED_ERRORS_BY_CALL = tuple(
    (name, error) for error, names in FIXED_ERRORS.items() for name in names.split()
)
NOT_INIT_PID = ArgumentTest(0, (INIT_PID,), negated=True)
ONLY_PID_ZERO = ArgumentTest(0, (0,))

# In namespaces of its own, where a jail sees only its own processes and its init process.
NAMESPACE_POLICY = SyscallPolicy(
    frozenset([*ALLOWED_CALLS.split(), "setsid", "setpgid"]),
    FIXED_ERRORS_BY_CALL,
    (
        *_build_rules(NOT_INIT_PID).items(),
        ("memfd_create", allow_if(ArgumentTest(1, (0,), MFD_HUGETLB))),
    ),
)
# Where its memory is not counted as a whole: memory behind no mapping cannot be seen.
NAMESPACE_POLICY_WITHOUT_CGROUP = SyscallPolicy(
    NAMESPACE_POLICY.allowed_calls,
    NAMESPACE_POLICY.fixed_errors,
    tuple(_build_rules(NOT_INIT_PID).items()),
)
# Among the processes of the host, where only a process group can be killed as a whole. Landlock's
# rules are made under this policy.
_LANDLOCK = frozenset(["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"])
# Landlock has no rule for these: they reach all files of the user.
_ATTRIBUTES = """
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
"""
PROCESS_GROUP_POLICY = SyscallPolicy(
    frozenset(ALLOWED_CALLS.split()) - frozenset(_ATTRIBUTES.split()) | _LANDLOCK,
    tuple(answer for answer in FIXED_ERRORS_BY_CALL if answer[0] not in _LANDLOCK),
    tuple(_build_rules(ONLY_PID_ZERO).items()),
)


def select_policy(tier: str, has_memory_cgroup: bool) -> SyscallPolicy:
    """Return the policy of a tier's jails.

    `has_memory_cgroup`: a control group bounds all of a jail's memory.
    """
    if tier != "bwrap":
        return PROCESS_GROUP_POLICY
    return NAMESPACE_POLICY if has_memory_cgroup else NAMESPACE_POLICY_WITHOUT_CGROUP
