"""Control of an SGLang server: pauses, sleep, new weights and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshrl.common.base.errors import MeshError, PeerLost
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang import readback, v0_5
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.sleep import ServerMemory, TaggedMemory
from meshrl.services.engine.sglang.weight_push import WeightPush

POLL_S = 10.0
PROBE_TIMEOUT_S = 25.0  # the server itself stops waiting after 20
MAX_FAILURES = 3
CONTROL_TIMEOUT_S = 20.0  # for an answer of the scheduler, which finishes its current step first


class HealthWatch:
    """Health check of a server: it fails after three failures in a row, with grace for long calls.

    `find_failure` serves the engine's thread, which raises the result. Probes run on the loop of
    the HTTP client. While tokens arrive no probe is needed.

    A server with `is_paused` would not generate for a health check. The probe then is a request
    that its scheduler answers during a pause too.
    """

    def __init__(
        self,
        http: HttpClient,
        get_exit_error: Callable[[], MeshError | None],
        poll_s: float = POLL_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        """Start the checks; `get_exit_error` returns the error of an exited server, or None."""
        self._http, self._get_exit_error = http, get_exit_error
        self._poll_s, self._probe_timeout_s = poll_s, probe_timeout_s
        self.is_paused = self.is_suspended = False  # suspended: it has no process for now
        self._failures = 0
        self._was_alive = False
        self._grace_count = 0
        self._failure: MeshError | None = None
        self._poll_task = http.spawn(self._poll_forever())

    def mark_alive(self) -> None:
        """Record that the server has sent something."""
        self._was_alive = True

    @contextmanager
    def allow_grace(self) -> Iterator[None]:
        """Ignore failures of probes that began before this call or overlap with it."""
        self._grace_count += 1
        try:
            yield
        finally:
            self._grace_count += 1
            self._was_alive = True

    def find_failure(self) -> MeshError | None:
        if self._failure is None:
            self._failure = self._get_exit_error()
        return self._failure

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self._poll()

    async def _poll(self) -> None:
        graces = self._grace_count
        if self._was_alive or graces % 2 or self.is_suspended:
            self._was_alive = False
            self._failures = 0
            return
        endpoint = v0_5.INFO if self.is_paused else v0_5.HEALTH
        reason = await self._http.probe(endpoint, self._probe_timeout_s)
        is_excused = self._was_alive or self.is_suspended or self._grace_count != graces
        if not reason or is_excused:
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self._failure = PeerLost(
                f"SGLang failed {MAX_FAILURES} health checks in a row: {reason}",
                where=self._http.url,
            )

    def close(self) -> None:
        self._poll_task.cancel()


class ServerControl:
    def __init__(
        self,
        http: HttpClient,
        watch: HealthWatch,
        weights: WeightPush,
        *,
        on_cpu: bool = True,
        dtype: torch.dtype = torch.float32,
        memory: ServerMemory | None = None,
    ) -> None:
        """Initialize the control.

        `dtype` is the type that the server computes in. `memory`: how it sleeps; None: by tags.
        """
        self.is_paused = False  # a pause was requested
        self._pause_confirmed = False  # the server has answered it
        self.memory_released = False  # a release was requested, and no restoration since
        self.updates = 0
        self._http, self._watch, self.weights = http, watch, weights
        self.mark_alive = watch.mark_alive  # callable from any thread
        self.on_cpu, self._dtype = on_cpu, dtype
        self._memory = memory or TaggedMemory(http, v0_5.SLEEP_TAGS)

    def check_alive(self) -> None:
        if (failed := self._watch.find_failure()) is not None:
            raise failed

    def pause(self) -> None:
        """Pause the server, from which all requests were withdrawn.

        It does not acknowledge a pause, but its scheduler takes calls in order.
        """
        if self._pause_confirmed:
            return
        # Set before the call: if the answer is lost, the server may be paused all the same.
        self.is_paused = self._watch.is_paused = True
        # Of the modes this one processes the results of an overlapped step before it returns.
        self._post(v0_5.PAUSE, {"mode": "retract"})
        self._pause_confirmed = True

    def resume(self) -> None:
        if self.is_paused:
            self._pause_confirmed = False
            self._post(v0_5.CONTINUE, {"torch_empty_cache": not self.on_cpu})
            self.is_paused = self._watch.is_paused = False

    def release_memory(self) -> None:
        """Release the memory of a server from which all requests were withdrawn.

        With requests in work it would crash.
        """
        self.pause()
        if self._memory.forgets_state:
            self.weights.close()  # a new process is in no group of the old one
        # Set before the call: if the answer is lost, the memory may be released all the same.
        self.memory_released, self._watch.is_suspended = True, self._memory.forgets_state
        with self._watch.allow_grace():
            self._memory.release()

    def release_tag(self, tag: str) -> None:
        """Release a part of the memory of a paused server without requests."""
        self.pause()
        with self._watch.allow_grace():
            self._memory.release_tag(tag)

    def resume_tag(self, tag: str) -> None:
        """Restore a part of the memory of a paused server, without its content."""
        with self._watch.allow_grace():
            self._memory.resume_tag(tag)

    def begin_resume_memory(self) -> None:
        """Begin to restore the memory, without waiting for it."""
        if self.memory_released:
            self._memory.begin_resume()

    def cancel_resume_memory(self) -> None:
        """Release what `begin_resume_memory` has begun to restore."""
        self._memory.cancel_resume()

    def resume_memory(self) -> None:
        """Restore the memory of a paused server, which stays paused."""
        if not self.memory_released:
            return
        # SGLang crashes if it restores tags twice, and it restores them even if its answer is lost.
        self.memory_released = self._memory.forgets_state
        with self._watch.allow_grace():
            self._memory.resume()
        self.memory_released = self._watch.is_suspended = False
        if self._memory.forgets_state:
            self._pause_confirmed = False
            self.pause()

    def load_weights(self, hf_weights: Mapping[str, Tensor], version: int, flush: bool) -> float:
        """Load weights, by Hugging Face names, into a paused server; `flush`: drop its cache.

        Return the seconds that remain to read them back. After an error the server's weights are
        undefined, and it must not resume before a call has succeeded.
        """
        with self._watch.allow_grace():
            left_s = self.weights.push(hf_weights, version, flush)
        self.updates += 1
        return left_s

    def find_differing(
        self, config: ModelConfig, hf_weights: Mapping[str, Tensor], deadline_s: float
    ) -> list[str]:
        """Return names of the server's tensors that differ from this version in any bit."""
        with self._watch.allow_grace():
            body = {"action": "checksum"}
            checksums = self._http.call("POST", v0_5.WEIGHTS_CHECKER, body, deadline_s=deadline_s)
        return readback.find_differing(config, checksums, hf_weights, self._dtype)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        with self._watch.allow_grace():
            self._http.call("POST", path, body, deadline_s=CONTROL_TIMEOUT_S)

    def close(self) -> None:
        """Restore the server's original state, except for its weights."""
        self._watch.close()
        try:
            if not self._memory.forgets_state:  # a server that has ended stays so
                self.resume_memory()
            self.resume()
        finally:
            self.weights.close()
