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
from meshrl.services.engine.sglang import reading_back, v0_5
from meshrl.services.engine.sglang.http import Http
from meshrl.services.engine.sglang.weights import WeightTransport

LOOK_S = 10.0
ANSWER_S = 25.0  # the server itself gives up after 20
STRIKES = 3
CONTROL_S = 20.0  # for an answer of the scheduler, which ends the step it is in first
UPDATE_S = 50.0  # for new weights, and to read them back; the service that asks waits 60

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
        http: Http,
        lost: Callable[[], MeshError | None],
        look_s: float = LOOK_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`lost` is asked for the error of a server that has ended."""
        self._http, self._lost = http, lost
        self._look_s, self._answer_s = look_s, answer_s
        self.stands = False
        self._strikes = 0
        self._heard = False
        self._graces = 0
        self._ended: MeshError | None = None
        self._looks = http.spawn(self._go_on_looking())

    def alive(self) -> None:
        """It has said something."""
        self._heard = True

    @contextmanager
    def grace(self) -> Iterator[None]:
        """No look counts that began before this or falls into it."""
        self._graces += 1
        try:
            yield
        finally:
            self._graces += 1
            self._heard = True

    def failure(self) -> MeshError | None:
        if self._ended is None:
            self._ended = self._lost()
        return self._ended

    async def _go_on_looking(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            await self._look()

    async def _look(self) -> None:
        graces = self._graces
        if self._heard or graces % 2:
            self._heard = False
            self._strikes = 0
            return
        asked = v0_5.INFO if self.stands else v0_5.HEALTH
        reason = await self._http.probe(asked, self._answer_s)
        if not reason or self._heard or self._graces != graces:
            self._strikes = 0
            return
        self._strikes += 1
        if self._strikes >= STRIKES:
            self._ended = PeerLost(
                f"SGLang failed {STRIKES} health checks in a row: {reason}", where=self._http.url
            )

    def close(self) -> None:
        self._looks.cancel()


class Control:
    def __init__(
        self,
        http: Http,
        watch: HealthWatch,
        transport: WeightTransport,
        *,
        on_cpu: bool = True,
        dtype: torch.dtype = torch.float32,
        clock: Clock | None = None,
        update_s: float = UPDATE_S,
    ) -> None:
        """`dtype`: what the server computes in."""
        self.stands = ""  # how it was asked to pause: RETRACT, IN_PLACE; empty: it goes on
        self._settled = False  # the pause is certain, and what came before it is here
        self.released = False  # it has given back its memory
        self.updates = 0
        self._http, self._watch, self._transport = http, watch, transport
        self.heard = watch.alive  # it has said something; from any thread
        self.on_cpu, self._dtype, self._update_s = on_cpu, dtype, update_s
        self._clock = clock or SystemClock()

    def check_alive(self) -> None:
        if (failed := self._watch.failure()) is not None:
            raise failed

    def halt(self, mode: str) -> None:
        """It stands, and what it generated before is on its way here."""
        if self._settled and self.stands in (mode, RETRACT):
            return
        self._settled = False
        # Before it is asked: should the answer be lost, it may stand all the same.
        self.stands = mode
        self._watch.stands = True
        self._post(v0_5.PAUSE, {"mode": mode})
        # The pause is not acknowledged. The scheduler answers these in its turn, behind the pause
        # and the tokens before it, by the way that tokens take.
        for _ in range(2):
            self._http.call("GET", v0_5.INFO, deadline_s=CONTROL_S)
        self._settled = True

    def go(self) -> None:
        if self.stands:
            self._settled = False
            self._post(v0_5.CONTINUE, {"torch_empty_cache": not self.on_cpu})
            self.stands = ""
            self._watch.stands = False

    def release(self) -> None:
        """A server with requests at work would die of this: they are retracted first."""
        self.halt(RETRACT)
        self._post(v0_5.RELEASE, {})
        self.released = True

    def regain(self) -> None:
        if self.released:
            self._post(v0_5.RESUME, {})
            self.released = False

    def put(self, theirs: Mapping[str, Tensor], version: int) -> float:
        """Weights by Hugging Face's names, into a server that stands; the seconds that are left to
        read them back. After an error nobody knows what it holds: it must not go on before this
        has succeeded.
        """
        until_s = self._clock.monotonic() + self._update_s
        flush = self.stands == RETRACT  # what stands in place still needs its cache
        with self._watch.grace():
            self._transport.push(theirs, version, flush, self._update_s)
        self.updates += 1
        return max(0.0, until_s - self._clock.monotonic())

    def differing(
        self, config: ModelConfig, theirs: Mapping[str, Tensor], deadline_s: float
    ) -> list[str]:
        """Names of the server's tensors that are not, bit by bit, of this version."""
        with self._watch.grace():
            body = {"action": "checksum"}
            told = self._http.call("POST", v0_5.READ_BACK, body, deadline_s=deadline_s)
        return reading_back.differing(config, told, theirs, self._dtype)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        with self._watch.grace():
            self._http.call("POST", path, body, deadline_s=CONTROL_S)

    def close(self) -> None:
        """Leaves the server as it was found, but for its weights."""
        self._watch.close()
        try:
            self.regain()
            self.go()
        finally:
            self._transport.close()
