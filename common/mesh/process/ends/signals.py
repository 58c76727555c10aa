"""What a process's end by a signal, or without a word, says to a person."""

from __future__ import annotations

import signal

CRASHES = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS,
    signal.SIGTRAP,
}  # fmt: skip


def named(code: int, why: str) -> str:
    """How a process ended, with the name of its signal: `signal 11 (SIGSEGV)`."""
    if code >= 0 or why != f"signal {-code}":
        return why
    try:
        return f"{why} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return why


def what_to_do(code: int) -> str:
    """Where to look when nothing but the exit status `code` is known."""
    if -code in CRASHES:
        return (
            "Native code has crashed (a kernel, a driver, a library): its log has what it said "
            "last; another `rollout.engine` or `mesh.device` tells whose it is"
        )
    if code == -signal.SIGKILL:
        return "Somebody kills it, or the kernel for want of memory: `dmesg` says which"
    if code < 0:
        return "Somebody or something on this host sends it that signal"
    return "It said no more: its log has what led to it"
