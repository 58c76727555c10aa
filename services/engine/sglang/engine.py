"""Engine whose requests run on an SGLang server.

The server decodes independently of this process; `step` takes the tokens that have arrived.
Requests beyond the server's slots wait here. Before a pause and before new weights those at the
server are withdrawn, so that its weights change while it is idle.

The server has its own interpreter, is controlled over HTTP and never patched. Other modules of this
folder hold its parts: the process (`server`), the connection (`http_client`), the names of SGLang
0.5 (`v0_5`), and weight transfers (`weight_transports`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl.common.base.errors import CorruptData, MeshError, Refused
from meshrl.common.base.files.releasable_memory import ReleasableMemory
from meshrl.common.generation.builtin.loaded_weights import check_shapes, get_tensor_shapes
from meshrl.common.generation.engine_contract import (
    NO_VERSION,
    EngineOutput,
    GenerationRequest,
    IntArray,
    WithoutCacheTransfer,
    adapter_in_use_error,
    check_request,
    quarantine_on_error,
    sequence_too_long_error,
)
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.adapters import ServerAdapters
from meshrl.services.engine.sglang.control import (
    CONTROL_TIMEOUT_S,
    HealthWatch,
    ServerControl,
)
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.sent_request import Decode
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.server_requests import SentWeights, ServerRequests
from meshrl.services.engine.sglang.server_tensors import ServerTensors
from meshrl.services.engine.sglang.sleep import (
    RestartedMemory,
    ServerMemory,
    TaggedMemory,
    TagMemory,
)
from meshrl.services.engine.sglang.weight_push import UPDATE_FLOOR_S, WeightPush
from meshrl.services.engine.sglang.weight_transports import DiskTransport, create_transport

ARRIVAL_TIMEOUT_S = 0.01  # a step waits this long for tokens
GATHER_S = 0.005  # between two steps, so that each takes the tokens of many requests
SCORE_TIMEOUT_S = 60.0
MIN_SLICE_S = 1.0  # requests of a shorter slice would spend much of it in prefills
MAX_PAUSE_SHARE = 0.05  # of a slice, for the pause at its end


@dataclass(frozen=True)
class ServerInfo:
    """Properties of a server that its engine needs."""

    backend: str = "sglang"  # display name of the backend
    ranks: int = 1  # processes that hold a share of the weights
    uses_seeds: bool = False  # the server samples from each request's seed
    has_adapters: bool = False  # the server was started with adapters
    # compare each version with the installed tensors; CorruptData if they differ
    read_back: bool = False
    recompute_on_update: bool = False  # drop caches of earlier weights
    restarts_for_sleep: bool = False  # its memory is released by ending its process
    restart_limit_s: float = 0.0  # limit of its start after such a sleep
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # by tag; 0: below its precision
    keeps_weights: bool = False  # it copies released weights to host memory and back


class SGLangEngine(WithoutCacheTransfer):
    """Implementation of `TokenEngine`. It sleeps until `wake` loads the first weights."""

    def __init__(
        self,
        http: HttpClient,
        control: ServerControl,
        config: ModelConfig,
        requests: ServerRequests,
        server_info: ServerInfo,
    ) -> None:
        self.backend, self.tensor_parallel_size = server_info.backend, server_info.ranks
        self.version = NO_VERSION
        self.busy_s = 0.0
        self.prefill_tokens_per_s = 0.0  # unknown: prefill and decode overlap
        self.cache_bytes_per_token = 0  # the cache cannot be moved
        self.cache_tokens = 0  # the server chooses the size
        self._http, self._control, self.requests = http, control, requests
        self._config, self._shapes, self._server_info = (
            config,
            get_tensor_shapes(config),
            server_info,
        )
        ranks = server_info.ranks if server_info.has_adapters else 0
        self._adapters = ServerAdapters(http, config, ranks, on_cpu=control.on_cpu)
        self._is_paused, self._is_asleep = False, True
        self.min_slice_s = MIN_SLICE_S
        self.keeps_weights = server_info.keeps_weights
        self._is_between_slices = False  # the server computes nothing until the next step
        self._stepped_at_s = float("-inf")
        self._computing_since_s: float | None = None  # end of the last step, while requests run

    @property
    def next_step_delay_s(self) -> float:
        """Seconds until the next step, which takes the tokens of many requests."""
        return max(0.0, self._stepped_at_s + GATHER_S - self.requests.clock.monotonic())

    @property
    def num_running(self) -> int:
        return len(self.requests.sent_requests)

    @property
    def num_waiting(self) -> int:
        return len(self.requests.waiting_requests) + len(self.requests.withdrawn_requests)

    @property
    def has_finished(self) -> bool:
        return self.requests.has_ended

    @property
    def num_steps(self) -> int:
        return self.requests.steps

    @property
    def tokens_generated(self) -> int:
        return self.requests.tokens_generated

    @property
    def tokens_computed(self) -> int:
        return self.requests.tokens_computed

    @property
    def tokens_cached(self) -> int:
        """Tokens of prompts that the server found in its own cache."""
        return self.requests.tokens_cached

    @property
    def num_preempted(self) -> int:
        return self.requests.preempted

    @property
    def wake_limit_s(self) -> float:
        """Seconds that a wake may take before it loads weights."""
        return self._server_info.restart_limit_s

    # -- requests --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._control.check_alive()
        for request in requests:
            check_request(request, self._config.token_id_end, self._adapters.loaded)
            self.requests.stop_checker.check_request(request)
            v0_5.check_sampling(request, self._config.token_id_end, self._server_info.uses_seeds)
        for request in requests:
            self.requests.add(request)
        self._send_waiting()

    def abort(self, ids: Iterable[int]) -> None:
        self.requests.abort(ids)

    def release_sessions(self, sessions: Iterable[int]) -> None:
        """Do nothing, because the server evicts its own cache by least recent use."""

    def drain_outputs(self, finished_only: bool = False) -> EngineOutput | None:
        return self.requests.drain(finished_only)

    def _send_waiting(self) -> None:
        if not self._is_halted and not self._is_between_slices:
            # The key includes the update count, because a new lineage numbers other weights
            # equally.
            key = f"w:{self.version}.{self._control.updates}"
            keeps_caches = not self._server_info.recompute_on_update
            weights = SentWeights(self.version, key, keeps_caches)
            self.requests.send_waiting(weights, self._adapters.loaded, self._control.mark_alive)

    @property
    def _is_halted(self) -> bool:
        return self._is_paused or self._is_asleep or self.version == NO_VERSION

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> bool:
        self._control.check_alive()
        if self._is_halted:
            self.requests.receive_events(0.0)
            return False
        self._is_between_slices = False
        self._resume_server()  # after a slice, a pause or an update that failed halfway
        self._send_waiting()
        if not self.requests.sent_requests:
            self.requests.receive_events(0.0)
            return False
        began_s = self._computing_since_s or self.requests.clock.monotonic()
        self.requests.receive_events(ARRIVAL_TIMEOUT_S)
        self.requests.retry_aborts()
        self._unload_unused_adapters()
        self._send_waiting()
        now_s = self._stepped_at_s = self.requests.clock.monotonic()
        is_busy = bool(self.requests.sent_requests)
        self.busy_s += now_s - began_s
        self._computing_since_s = now_s if is_busy else None
        return is_busy

    # -- time slices -----------------------------------------------------------------------------

    def end_slice(self) -> None:
        """Withdraw all requests and pause the server, until the next step sends them again.

        They find their keys and values in the server's cache, unless it is released. SGLang 0.5
        does not report the last step before a pause in place, and releases no memory with requests
        in work.
        """
        self._is_between_slices = True
        if not self._is_halted and not self._control.is_paused:
            began_s = self.requests.clock.monotonic()
            self._pause_server()
            pause_s = self.requests.clock.monotonic() - began_s
            self.min_slice_s = max(MIN_SLICE_S, pause_s / MAX_PAUSE_SHARE)

    def collect_weights(self) -> ReleasableMemory:
        return self._collect_memory("weights")

    def collect_cache(self) -> ReleasableMemory:
        return self._collect_memory("kv_cache")

    def _collect_memory(self, tag: str) -> ReleasableMemory:
        if self._server_info.restarts_for_sleep:
            raise Refused(
                "this SGLang server releases memory only by ending its process", where="engine"
            )
        return TagMemory(self._control, tag, self._server_info.memory_bytes.get(tag, 0))

    @property
    def cache_size_bytes(self) -> int:
        return self._server_info.memory_bytes.get("kv_cache", 0)

    # -- pauses and weights ----------------------------------------------------------------------

    def pause(self) -> None:
        if not self._is_halted:
            self._pause_server()
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if self._is_asleep:
            self._control.begin_resume_memory()  # `wake` follows
        self._resume_server()

    def sleep(self) -> None:
        if self._is_asleep and self._control.memory_released:
            self._control.cancel_resume_memory()  # of a wake that was given up
            return
        if self._server_info.has_adapters and self._server_info.restarts_for_sleep:
            raise Refused(
                "SGLang would have to restart for a sleep of this model, and lose its adapters",
                where="engine",
                fix='Set lora.engine_mode = "merged"',
            )
        self._pause_server()
        self._is_asleep = True
        self._control.release_memory()

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load new weights; running requests continue under them.

        They find their keys and values in the server's cache if `kv_on_update` is keep, else these
        are recomputed. Requests without a token start again, under the new key.
        """
        self._control.check_alive()
        check_shapes(state, self._shapes)
        if self._is_asleep:
            self.version = version
            return
        self._pause_server()
        self._load_weights(state, version, flush=self._server_info.recompute_on_update)

    def wake(self, state: Mapping[str, Tensor], version: int) -> None:
        if not self._is_asleep:
            self.update_weights(state, version)
            return
        self._control.check_alive()
        check_shapes(state, self._shapes)
        self._pause_server()
        self._control.resume_memory()
        self._is_asleep = False
        self._load_weights(state, version, flush=True)

    @property
    def server_transport(self) -> dict[str, Any] | None:
        """Report of the last transfer of weights to the server; None before the first."""
        return self._control.weights.last_report

    @property
    def adapter_versions(self) -> Mapping[str, int]:
        return self._adapters.versions

    def load_adapter(
        self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int
    ) -> None:
        """Load an adapter version.

        Running requests continue with the version that they began with.
        """
        self._control.check_alive()
        self._adapters.load(name, tensors, scale, version)
        self._unload_unused_adapters()

    def unload_adapter(self, name: str) -> None:
        sent = [sent.request for sent in self.requests.started_requests]
        if any(r.adapter == name for r in [*self.requests.waiting_requests.values(), *sent]):
            raise adapter_in_use_error(name)
        self._adapters.unload(name)
        self._unload_unused_adapters()

    def _unload_unused_adapters(self) -> None:
        self._adapters.unload_unused(
            one.adapter.server_name
            for one in self.requests.started_requests
            if one.adapter is not None
        )

    def _pause_server(self) -> None:
        """Withdraw all requests from the server, and pause it."""
        self._computing_since_s = None
        self.requests.withdraw_all(CONTROL_TIMEOUT_S)
        self._control.pause()

    def _resume_server(self) -> None:
        if not self._is_halted and not self._is_between_slices:
            self._control.resume()
            self._send_waiting()

    def _load_weights(self, state: Mapping[str, Tensor], version: int, *, flush: bool) -> None:
        theirs = ServerTensors(self._config, state)
        with quarantine_on_error(version, self.quarantine):
            left_s, config = self._control.load_weights(theirs, version, flush), self._config
            if self._server_info.read_back and (
                odd := self._control.find_differing(config, theirs, left_s)
            ):
                raise CorruptData(f"{len(odd)} tensors differ from the loaded weights: {odd[0]}")
        self.version = version
        self._resume_server()

    def quarantine(self) -> None:
        """Pause the server for good after an undefined state; see `_resume_server`.

        A server that cannot be paused may continue, so its requests end here; they are requested
        again once there is a complete version.
        """
        self.version = NO_VERSION
        if self._control.is_paused:
            return
        try:
            self._pause_server()
        except MeshError:
            self.requests.abort_all_locally()

    def score(self, tokens: IntArray, adapter: str = "") -> NDArray[np.float32]:
        row = np.asarray(tokens, np.int32)
        request = GenerationRequest(-1, row, 0, 1.0, (), 0, -1, adapter=adapter)
        check_request(request, self._config.token_id_end, self._adapters.loaded)
        self._control.check_alive()
        if self._is_halted:
            raise Refused(
                "the engine is paused or asleep", where="engine", fix="Resume or wake it first"
            )
        if len(row) > self.requests.max_length:
            raise sequence_too_long_error(len(row), self.requests.max_length)
        there = self._adapters.loaded[adapter].server_name if adapter else ""
        body = v0_5.build_score_body(row.tolist(), self.requests.create_rid(), there)
        return v0_5.parse_scores(
            self._http.call("POST", v0_5.GENERATE, body, deadline_s=SCORE_TIMEOUT_S)
        )

    def close(self) -> None:
        """Restore the server's original state unless it has exited; the process that started it
        stops it.
        """
        self.requests.close()
        with contextlib.suppress(MeshError):
            self._control.close()


def attach_engine(
    server: SGLangServer,
    config: ModelConfig,
    slots: int,
    max_length: int,
    *,
    weights: str = "auto",
    kv_on_update: str = "keep",
    decode: Decode | None = None,
) -> SGLangEngine:
    """Create the engine of a server, asleep until it gets weights.

    Their transfer and, if configured, their read-back may take UPDATE_FLOOR_S, and more by bytes.
    """
    how = server.launch_config
    choice = server.choose_transport(weights)
    directory = how.directory / "weights"
    push = WeightPush(
        choice,
        create_transport(choice, server.http, directory, server.ranks),
        fallback=DiskTransport(server.http, directory) if weights == "auto" else None,
        clock=server.clock,
        floor_s=UPDATE_FLOOR_S,
    )
    memory: ServerMemory = RestartedMemory(server)
    if server.sleep_tags:
        memory = TaggedMemory(server.http, server.sleep_tags)
    control = ServerControl(
        server.http,
        HealthWatch(server.http, server.get_exit_error),
        push,
        on_cpu=how.device == "cpu",
        dtype=getattr(torch, how.dtype),
        memory=memory,
    )
    served = ServerInfo(
        backend=f"sglang {server.version}, {how.dtype}, {how.device}",
        ranks=server.ranks,
        uses_seeds=server.uses_seeds,
        has_adapters=how.adapter_limits is not None,
        read_back=how.read_back,
        recompute_on_update=kv_on_update == "recompute",
        restarts_for_sleep=memory.forgets_state,
        restart_limit_s=server.limits.longest_s if memory.forgets_state else 0.0,
        memory_bytes=server.memory_bytes,
        keeps_weights=server.keeps_weights,
    )
    requests = ServerRequests(
        server.http,
        config.token_id_end,
        slots,
        max_length,
        decode,
        server.clock,
        how.stream_interval,
    )
    return SGLangEngine(server.http, control, config, requests, served)
