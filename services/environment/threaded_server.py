"""Server of an environment process whose operations wait: each runs in a thread of its own.

Each operation is answered when it ends, so one that waits for its tools delays no other. Frames in
are lists of [number, key, operation, argument], frames out lists of [number, status, value], as
those of `verifiers_environment`. Operations of one trajectory run one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import msgpack

from meshrl.common.environment.framing import pack_message
from meshrl.common.mesh.process.entry.child import ChildChannel

LIVENESS_OPERATION = "text"  # operation that checks for liveness; no environment's


RunOperation = Callable[[int, str, Any], tuple[str, Any]]  # of key, operation, argument


def serve_threaded(channel: ChildChannel, run_operation: RunOperation, num_threads: int) -> None:
    """Answer the shard until it closes the channel, in `num_threads` threads.

    Return when the operations that had begun have ended.
    """
    sending = Lock()

    def answer(number: int, key: int, operation: str, argument: Any) -> None:
        _send_reply(channel, sending, number, *run_operation(key, operation, argument))

    with ThreadPoolExecutor(num_threads, thread_name_prefix="environment") as pool:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (block := channel.recv()) is not None:
                for number, key, operation, argument in msgpack.unpackb(block, raw=False):
                    if operation == LIVENESS_OPERATION:  # no caller waits for its answer
                        _send_reply(channel, sending, number, "ok", "")
                    else:
                        pool.submit(answer, number, key, operation, argument)
        pool.shutdown(wait=True, cancel_futures=True)


def _send_reply(
    channel: ChildChannel, send_lock: Lock, number: int, status: str, value: Any
) -> None:
    content = pack_message([[number, status, value]])
    with send_lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(content)
