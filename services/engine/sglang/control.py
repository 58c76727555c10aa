"""Controls an SGLang server: pauses, sleep, new weights, and whether it answers at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import MeshError, PeerLost
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang import readback, v0_5
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.weight_transports import ServerWeightTransport

POLL_S = 10.0
PROBE_TIMEOUT_S = 25.0  # the server itself gives up after 20
MAX_FAILURES = 3
CONTROL_TIMEOUT_S = 20.0  # for an answer of the scheduler, which ends the step it is in first
UPDATE_TIMEOUT_S = 50.0  # for new weights, and to read them back; the service that asks waits 60

RETRACT, IN_PLACE = "retract", "in_place"  # give their cache up, or keep it


class HealthWatch:
    """Checks that a server answers: three failures in a row, with grace while it is kept busy.

    `failure` is asked by the engine's thread, which is told by what it raises; looks run on the
    loop that talks to the server. While tokens come there is nothing to ask.

    `stands`: the server is paused. It would not generate for a health check then, and is asked for
    something that its scheduler answers in a pause too.
    """

    def __init__(
        self,
        http: HttpClient,
        get_exit_error: Callable[[], MeshError | None],
        poll_s: float = POLL_S,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        """`lost` is asked for the error of a server that has ended."""
        self._http, self._get_exit_error = http, get_exit_error
        self._poll_s, self._probe_timeout_s = poll_s, probe_timeout_s
        self.is_paused = False
        self._failures = 0
        self._was_alive = False
        self._grace_count = 0
        self._failure: MeshError | None = None
        self._poll_task = http.spawn(self._poll_forever())

    def mark_alive(self) -> None:
        """It has said something."""
        self._was_alive = True

    @contextmanager
    def allow_grace(self) -> Iterator[None]:
        """No look counts that began before this or falls into it."""
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
        if self._was_alive or graces % 2:
            self._was_alive = False
            self._failures = 0
            return
        asked = v0_5.INFO if self.is_paused else v0_5.HEALTH
        reason = await self._http.probe(asked, self._probe_timeout_s)
        if not reason or self._was_alive or self._grace_count != graces:
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
        transport: ServerWeightTransport,
        *,
        on_cpu: bool = True,
        dtype: torch.dtype = torch.float32,
        clock: Clock | None = None,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> None:
        """`dtype`: what the server computes in."""
        self.pause_mode = ""  # how it was asked to pause: RETRACT, IN_PLACE; empty: it goes on
        self._pause_confirmed = False  # the pause is certain, and what came before it is here
        self.memory_released = False  # it has given back its memory
        self.updates = 0
        self._http, self._watch, self._transport = http, watch, transport
        self.mark_alive = watch.mark_alive  # it has said something; from any thread
        self.on_cpu, self._dtype, self._update_timeout_s = on_cpu, dtype, update_timeout_s
        self._clock = clock or SystemClock()

    def check_alive(self) -> None:
        if (failed := self._watch.find_failure()) is not None:
            raise failed

    def pause(self, mode: str) -> None:
        """It stands, and what it generated before is on its way here."""
        if self._pause_confirmed and self.pause_mode in (mode, RETRACT):
            return
        self._pause_confirmed = False
        # Before it is asked: should the answer be lost, it may stand all the same.
        self.pause_mode = mode
        self._watch.is_paused = True
        self._post(v0_5.PAUSE, {"mode": mode})
        # The pause is not acknowledged. The scheduler answers these in its turn, behind the pause
        # and the tokens before it, by the way that tokens take.
        for _ in range(2):
            self._http.call("GET", v0_5.INFO, deadline_s=CONTROL_TIMEOUT_S)
        self._pause_confirmed = True

    def resume(self) -> None:
        if self.pause_mode:
            self._pause_confirmed = False
            self._post(v0_5.CONTINUE, {"torch_empty_cache": not self.on_cpu})
            self.pause_mode = ""
            self._watch.is_paused = False

    def release_memory(self) -> None:
        """A server with requests at work would die of this: they are retracted first."""
        self.pause(RETRACT)
        self._post(v0_5.RELEASE, {})
        self.memory_released = True

    def resume_memory(self) -> None:
        if self.memory_released:
            self._post(v0_5.RESUME, {})
            self.memory_released = False

    def load_weights(self, hf_weights: Mapping[str, Tensor], version: int) -> float:
        """Weights by Hugging Face's names, into a server that stands; the seconds that are left to
        read them back. After an error nobody knows what it holds: it must not go on before this
        has succeeded.
        """
        until_s = self._clock.monotonic() + self._update_timeout_s
        flush = self.pause_mode == RETRACT  # what stands in place still needs its cache
        with self._watch.allow_grace():
            self._transport.push(hf_weights, version, flush, self._update_timeout_s)
        self.updates += 1
        return max(0.0, until_s - self._clock.monotonic())

    def find_differing(
        self, config: ModelConfig, hf_weights: Mapping[str, Tensor], deadline_s: float
    ) -> list[str]:
        """Names of the server's tensors that are not, bit by bit, of this version."""
        with self._watch.allow_grace():
            body = {"action": "checksum"}
            told = self._http.call("POST", v0_5.WEIGHTS_CHECKER, body, deadline_s=deadline_s)
        return readback.find_differing(config, told, hf_weights, self._dtype)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        with self._watch.allow_grace():
            self._http.call("POST", path, body, deadline_s=CONTROL_TIMEOUT_S)

    def close(self) -> None:
        """Leaves the server as it was found, but for its weights."""
        self._watch.close()
        try:
            self.resume_memory()
            self.resume()
        finally:
            self._transport.close()
