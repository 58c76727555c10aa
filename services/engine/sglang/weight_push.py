"""Pushes of versions to a server, with deadlines by bytes and by the rates of earlier pushes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.model.files.tensor_source import count_bytes
from meshrl.common.model.files.tensor_storages import trim_heap
from meshrl.common.weights.transports.selector import TransportSelector
from meshrl.services.engine.measurement.load_deadlines import Deadline, compute_load_deadline_s
from meshrl.services.engine.sglang.server_tensors import describe_tensors
from meshrl.services.engine.sglang.transport_choice import ServerTransportChoice
from meshrl.services.engine.sglang.weight_buckets import CannotShare
from meshrl.services.engine.sglang.weight_transports import DiskTransport, ServerWeightTransport

UPDATE_FLOOR_S = 50.0  # for the calls of an update, and to read tensors back

log = logging.getLogger(__name__)


class WeightPush:
    """Pushes of one server by its transport, or from a file after that could not share memory."""

    def __init__(
        self,
        choice: ServerTransportChoice,
        transport: ServerWeightTransport,
        *,
        fallback: DiskTransport | None = None,
        clock: Clock | None = None,
        floor_s: float = UPDATE_FLOOR_S,
    ) -> None:
        """Initialize; `fallback` replaces a transport whose sender cannot share memory."""
        self.choice, self._transport, self._fallback = choice, transport, fallback
        self._clock, self.floor_s = clock or SystemClock(), floor_s
        # The devices decide, since a server may not survive the trial of a transport. The selector
        # measures and predicts.
        self._measurements = TransportSelector()
        self.last_report: dict[str, Any] | None = None  # for `meshrl weights --explain`

    def push(self, state: Mapping[str, Tensor], version: int, flush_cache: bool) -> float:
        """Install these weights, and return the seconds that remain to read them back.

        After an error the server's weights are undefined until a push succeeds.
        """
        began_s = self._clock.monotonic()
        size_bytes = sum(map(count_bytes, describe_tensors(state).values()))
        measured = self._measurements.choose(size_bytes, [self.choice.transport])
        deadline_s = compute_load_deadline_s(size_bytes, self.floor_s, measured.predicted_s)
        deadline = Deadline(self._clock, began_s + deadline_s)
        try:
            self._transport.push(state, version, flush_cache, deadline)
        except CannotShare as error:
            if self._fallback is None:
                raise
            self._replace_transport(error)
            self._transport.push(state, version, flush_cache, deadline)
            measured = self._measurements.choose(size_bytes, [self.choice.transport])
        trim_heap()  # the heap of a role process retains assembled layers
        took_s = self._clock.monotonic() - began_s
        verdict = self._measurements.record_success(measured, size_bytes, took_s)
        rates = self._measurements.rates_bytes_per_s()
        self.last_report = {
            "way": self.choice.transport,
            "why": self.choice.reason,
            "verdict": verdict,
            "bytes": size_bytes,
            "took_s": round(took_s, 4),
            "predicted_s": measured.predicted_s,
            "deadline_s": round(deadline_s, 3),
            "rates": {way: round(rate) for way, rate in rates.items()},
        }
        return deadline.left_s

    def _replace_transport(self, error: CannotShare) -> None:
        assert self._fallback is not None
        log.warning("weights go to the server by a file from now on: %s", error)
        self._transport.close()
        reason = f"{self.choice.transport} failed: {error.message}"
        self.choice = replace(self.choice, transport="disk", reason=reason, gpus=(), backend="")
        self._transport, self._fallback = self._fallback, None

    def close(self) -> None:
        self._transport.close()
