"""Adapters of a server, loaded by its LoRA endpoints.

A server accepts no new tensors under a loaded name, so each version has a name of its own. Running
requests continue with the version that they began with. A version is unloaded after its last
request.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshrl.common.base.errors import MeshError, Refused, RemoteFailure
from meshrl.common.generation.batch.adapter_deltas import build_adapter_deltas
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.architecture.projections import FUSED_PROJECTIONS, build_projections
from meshrl.common.model.network.lora import parse_adapter_tensor_name, to_peft
from meshrl.services.engine.measurement.load_deadlines import compute_load_deadline_s
from meshrl.services.engine.sglang import v0_5
from meshrl.services.engine.sglang.http_client import HttpClient, PendingResult
from meshrl.services.engine.sglang.readback import pad_tensor
from meshrl.services.engine.sglang.weight_buckets import pickle_inline

LOAD_TIMEOUT_S = 50.0  # to unload an adapter or, beside its bytes, to install one

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedAdapter:
    server_name: str  # name at the server
    version: int


class ServerAdapters:
    """Adapters of a server beside its base.

    `ranks`: processes that hold a share of the weights; 0: the server was started without adapters.
    """

    def __init__(self, http: HttpClient, config: ModelConfig, ranks: int, *, on_cpu: bool) -> None:
        self.loaded: dict[str, LoadedAdapter] = {}  # newest version of each adapter, by our name
        self._http, self._config, self._ranks, self._on_cpu = http, config, ranks, on_cpu
        self._numbers = itertools.count()
        # server names of earlier versions, which requests may still use
        self._superseded: set[str] = set()
        self._unloads: list[PendingResult[Any]] = []

    @property
    def versions(self) -> dict[str, int]:
        return {name: loaded.version for name, loaded in self.loaded.items()}

    def load(self, name: str, tensors: Mapping[str, Tensor], scale: float, version: int) -> None:
        """Load a version into the server.

        Raise Refused if it does not fit or the server accepts none, RemoteFailure if the server did
        not load it; the previous version stays then.
        """
        if not self._ranks or not name:
            raise Refused(
                "this SGLang server was started without adapters",
                where="engine",
                fix='Set lora.engine_mode to "merged", or to "beside" and restart the engine',
            )
        ranks = {tensor.shape[0] for factor, tensor in tensors.items() if factor.endswith(".a")}
        build_adapter_deltas(self._config, tensors, scale)
        if len(ranks) != 1:
            raise Refused(
                f"the adapter has factors of ranks {sorted(ranks)}, and SGLang supports one rank",
                where="engine",
                fix="Train all projections with one rank",
            )
        there = f"{name}@{version}.{next(self._numbers)}"
        rank, theirs = ranks.pop(), to_peft(self._config, fill_fused_factors(self._config, tensors))
        if self._on_cpu:
            theirs = {name: pad_tensor(name, tensor) for name, tensor in theirs.items()}
        body = {
            "lora_name": there,
            "config_dict": {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": scale * rank,
                "target_modules": sorted({name.split(".")[-3] for name in theirs}),
            },
            "serialized_named_tensors": [pickle_inline(theirs)] * self._ranks,
        }
        size_bytes = sum(tensor.nbytes for tensor in theirs.values())
        deadline_s = compute_load_deadline_s(size_bytes, LOAD_TIMEOUT_S)
        answer = self._http.call("POST", v0_5.LOAD_ADAPTER, body, deadline_s=deadline_s)
        if not isinstance(answer, dict) or not answer.get("success", False):
            message = answer.get("error_message", "") if isinstance(answer, dict) else answer
            raise RemoteFailure(
                f"{v0_5.LOAD_ADAPTER} failed for {there}: {message}", where=self._http.url
            )
        if (before := self.loaded.get(name)) is not None:
            self._superseded.add(before.server_name)
        self.loaded[name] = LoadedAdapter(there, version)

    def unload(self, name: str) -> None:
        """Unload an adapter that no request uses."""
        loaded = self.loaded.pop(name, None)
        if loaded is not None:
            self._superseded.add(loaded.server_name)

    def unload_unused(self, used: Iterable[str]) -> None:
        """Unload superseded versions that are not in `used`."""
        for there in self._superseded - set(used):
            self._superseded.discard(there)
            body = {"lora_name": there}
            unload_call = self._http.start_call(
                "POST", v0_5.UNLOAD_ADAPTER, body, deadline_s=LOAD_TIMEOUT_S
            )
            self._unloads.append(unload_call)
        for unload_call in [a for a in self._unloads if a.done()]:
            self._unloads.remove(unload_call)
            try:
                self._http.wait_for(unload_call, v0_5.UNLOAD_ADAPTER, LOAD_TIMEOUT_S)
            except MeshError as error:
                log.warning("an adapter could not be unloaded: %s", error)


def fill_fused_factors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add zero factors for matrices that SGLang fuses with adapted ones.

    SGLang requires adapters of all or none of q, k and v, and of both or none of gate and up.
    """
    found, parts = dict(tensors), build_projections(config)
    for name, tensor in tensors.items():
        factor = parse_adapter_tensor_name(name)
        assert factor is not None  # `changes_of` has checked that
        width = tensor.shape[0 if factor.factor == "a" else 1]
        for other in FUSED_PROJECTIONS[parts[factor.projection].fused_name]:
            shape = {"a": (width, parts[other].columns), "b": (parts[other].rows, width)}
            prefix = f"layers.{factor.layer}.adapters.{other}."
            for kind, size in shape.items():
                found.setdefault(prefix + kind, tensor.new_zeros(size))
    return found
