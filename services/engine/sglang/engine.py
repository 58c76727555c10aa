"""The engine whose requests an SGLang server runs: hands requests over, brings tokens back.

The server decodes whether or not anybody looks; `step` takes what has come. Requests beyond its
slots wait here, so that an abort, a pause or new weights find a server that holds only what runs.

The server has its own interpreter, is driven over HTTP and never patched. Its parts are beside
this: the process (`server`), the wire (`http`), what SGLang 0.5 calls things (`v0_5`), weights on
their way (`weights`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.base.errors import Damaged, MeshError, Refused
from meshrl.common.generation.builtin.loaded import check_shapes, shapes_of
from meshrl.common.generation.contract import (
    NO_VERSION,
    Flush,
    Ints,
    Request,
    Unshared,
    check,
    in_use,
    replacing,
    too_long,
)
from meshrl.common.generation.served_by_sglang import known_rows
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf import state_to_hf
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.adapters import ServerAdapters
from meshrl.services.engine.sglang.control import (
    IN_PLACE,
    RETRACT,
    UPDATE_S,
    Control,
    HealthWatch,
)
from meshrl.services.engine.sglang.http import Http
from meshrl.services.engine.sglang.requests import Decode, Requests
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.weights import transport

ARRIVAL_S = 0.01  # a step waits this long for tokens
SCORE_S = 60.0


@dataclass(frozen=True)
class ServedEngine:
    """What an engine is to know of its server."""

    path: str = "sglang"  # what computes, for people
    ranks: int = 1  # processes that hold a share of the weights
    seeded: bool = False  # it samples from each request's seed
    adapters: bool = False  # it was started for them
    read_back: bool = False  # each version is compared with what was put in place; Damaged if not
    recompute: bool = False  # caches of the weights before go with them


class SGLangEngine(Unshared):
    """See `TokenEngine`. It sleeps until `wake` brings the first weights."""

    def __init__(
        self,
        http: Http,
        control: Control,
        config: ModelConfig,
        requests: Requests,
        served: ServedEngine,
    ) -> None:
        self.path, self.tensor_parallel = served.path, served.ranks
        self.version = NO_VERSION
        self.busy_s = 0.0
        self.due_s = 0.0
        self.prefill_tokens_per_s = 0.0  # not to be told apart from what it decodes meanwhile
        self.cache_bytes_per_token = 0  # it cannot be moved
        self._http, self._control, self.requests = http, control, requests
        self._config, self._shapes, self._served = config, shapes_of(config), served
        ranks = served.ranks if served.adapters else 0
        self._adapters = ServerAdapters(http, config, ranks, on_cpu=control.on_cpu)
        self._paused, self._asleep = False, True

    @property
    def running(self) -> int:
        return len(self.requests.sent)

    @property
    def waiting(self) -> int:
        return len(self.requests.waiting)

    @property
    def ended(self) -> bool:
        return self.requests.ended

    @property
    def steps(self) -> int:
        return self.requests.steps

    @property
    def tokens_generated(self) -> int:
        return self.requests.tokens_generated

    @property
    def tokens_computed(self) -> int:
        return self.requests.tokens_computed

    @property
    def tokens_cached(self) -> int:
        """Tokens of prompts that its server found in a cache of its own."""
        return self.requests.tokens_cached

    @property
    def preempted(self) -> int:
        return self.requests.preempted

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._control.check_alive()
        for request in requests:
            check(request, self._config.ids_end, self._adapters.loaded)
            self.requests.stop_text.check(request)
            v0_5.check_sampling(request, self._config.ids_end, self._served.seeded)
        for request in requests:
            self.requests.add(request)
        self._fill()

    def abort(self, ids: Iterable[int]) -> None:
        self.requests.abort(ids, bool(self._control.stands))

    def release(self, sessions: Iterable[int]) -> None:
        """The server's cache is its own affair: it drops what was used longest ago."""

    def drain(self, ended_only: bool = False) -> Flush | None:
        return self.requests.drain(ended_only)

    def _fill(self) -> None:
        if not self._halted:
            # By update too: a new lineage gives the same numbers to other weights.
            cache = f"w:{self.version}.{self._control.updates}"
            self.requests.fill(cache, self._adapters.loaded, self._control.heard)

    @property
    def _halted(self) -> bool:
        return self._paused or self._asleep or self.version == NO_VERSION

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        self._control.check_alive()
        if self._halted:
            self.requests.take(0.0)
            return False
        self._go()  # where a pause or an update failed before it was over
        self._fill()
        if not self.requests.sent:
            self.requests.take(0.0)
            return False
        began = self.requests.clock.monotonic()
        self.requests.take(ARRIVAL_S)
        self.requests.press_aborts()
        self._sweep_adapters()
        self._fill()
        self.busy_s += self.requests.clock.monotonic() - began
        return bool(self.requests.sent)

    # -- pauses and weights ----------------------------------------------------------------------

    def pause(self) -> None:
        if not self._halted:
            self._halt(RETRACT)
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._go()

    def sleep(self) -> None:
        if not self._asleep:
            self._halt(RETRACT)
            self._asleep = True
            self._control.release()

    def swap(self, state: Mapping[str, Tensor], version: int) -> None:
        """What runs goes on under the new weights: with its cache where `kv_on_update` is keep,
        else it is computed again. What has no token yet starts again, under the new key."""
        self._control.check_alive()
        check_shapes(state, self._shapes)
        if self._asleep:
            self.version = version
            return
        # The version of an adapter stays, so its tokens would not tell of a cache of another base.
        beside = any(sent.adapter is not None for sent in self.requests.sent.values())
        self._halt(RETRACT if self._served.recompute or beside else IN_PLACE)
        self._load(state, version)

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        if not self._asleep:
            self.swap(state, version)
            return
        self._control.check_alive()
        check_shapes(state, self._shapes)
        self._halt(RETRACT)
        self._control.regain()
        self._asleep = False
        self._load(state, version)

    @property
    def adapters(self) -> Mapping[str, int]:
        return self._adapters.versions

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """What runs goes on with the version that it began with."""
        self._control.check_alive()
        self._adapters.load(name, tensors, scale, version)
        self._sweep_adapters()

    def unload_adapter(self, name: str) -> None:
        sent = [sent.request for sent in self.requests.sent.values()]
        if any(r.adapter == name for r in [*self.requests.waiting.values(), *sent]):
            raise in_use(name)
        self._adapters.unload(name)
        self._sweep_adapters()

    def _sweep_adapters(self) -> None:
        sent = self.requests.sent.values()
        self._adapters.sweep(one.adapter.there for one in sent if one.adapter is not None)

    def _halt(self, mode: str) -> None:
        self._control.halt(mode)
        self.requests.take(0.0)

    def _go(self) -> None:
        if not self._halted:
            self._control.go()
            self._fill()

    def _load(self, state: Mapping[str, Tensor], version: int) -> None:
        self.requests.take_back()
        theirs = known_rows(self._config, state_to_hf(self._config, state))
        with replacing(version, self.quarantine):
            left_s, config = self._control.put(theirs, version), self._config
            if self._served.read_back and (odd := self._control.differing(config, theirs, left_s)):
                raise Damaged(f"{len(odd)} tensors are not what was put there: {odd[0]}")
        self.version = version
        self._go()

    def quarantine(self) -> None:
        """The server stands, and stays so: see `_go`. One that cannot be told to may go on, so that
        what it works on ends here: it is asked for again where there is a whole version.
        """
        self.version = NO_VERSION
        if self._control.stands:
            return
        try:
            self._halt(RETRACT)
        except MeshError:
            self.requests.hang_up_all()

    def score(self, tokens: Ints, adapter: str = "") -> NDArray[np.float32]:
        row = np.asarray(tokens, np.int32)
        asked = Request(-1, row, 0, 1.0, (), 0, -1, adapter=adapter)
        check(asked, self._config.ids_end, self._adapters.loaded)
        self._control.check_alive()
        if self._halted:
            raise Refused("the engine rests", where="engine", fix="resume or wake it first")
        if len(row) > self.requests.max_length:
            raise too_long(len(row), self.requests.max_length)
        there = self._adapters.loaded[adapter].there if adapter else ""
        body = v0_5.score(row.tolist(), self.requests.new_rid(), there)
        return v0_5.scores(self._http.call("POST", v0_5.GENERATE, body, deadline_s=SCORE_S))

    def close(self) -> None:
        """Leaves the server as it was found, unless that has ended; who started it stops it."""
        self.requests.close()
        with contextlib.suppress(MeshError):
            self._control.close()


def attach(
    server: SGLangServer,
    config: ModelConfig,
    slots: int,
    max_length: int,
    *,
    weights: str = "auto",
    kv_on_update: str = "keep",
    decode: Decode | None = None,
    update_s: float = UPDATE_S,
) -> SGLangEngine:
    """The engine of a server, asleep until it gets weights; they must arrive, and be read back
    where that is asked for, in `update_s`.
    """
    how = server.launch
    way = transport(weights, server.http, how.directory / "weights", server.ranks, how.device)
    control = Control(
        server.http,
        HealthWatch(server.http, server.lost),
        way,
        on_cpu=how.device == "cpu",
        dtype=getattr(torch, how.dtype),
        clock=server.clock,
        update_s=update_s,
    )
    served = ServedEngine(
        path=f"sglang {server.version}, {how.dtype}, {how.device}",
        ranks=server.ranks,
        seeded=server.seeded,
        adapters=how.adapters is not None,
        read_back=how.read_back,
        recompute=kv_on_update == "recompute",
    )
    requests = Requests(server.http, config.ids_end, slots, max_length, decode, server.clock)
    return SGLangEngine(server.http, control, config, requests, served)
