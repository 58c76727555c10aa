"""Small server with the interface of SGLang, for hosts without it.

It computes with the built-in engine, uses the protocol of `v0_5`, and loads weights from disk
tensor by tensor, so that an update can end half-way. `tests/sglang` checks the real server equally.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import pickle
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load
from torch import Tensor

from meshrl.common.api.engine import FinishReason
from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import MeshError, PeerLost, Refused
from meshrl.common.generation.engine_contract import GenerationRequest, RequestOutput
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import (
    GLOBAL_TENSOR_NAMES,
    LAYER_TENSOR_NAMES,
    get_fused_parts,
    state_to_hf,
)
from meshrl.services.engine.sglang import readback, v0_5
from meshrl.services.engine.sglang.control import HealthWatch, ServerControl
from meshrl.services.engine.sglang.engine import ServerInfo, SGLangEngine
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.server_requests import ServerRequests
from meshrl.services.engine.sglang.sleep import ServerMemory
from meshrl.services.engine.sglang.transport_choice import PushDevices, choose_server_transport
from meshrl.services.engine.sglang.weight_push import WeightPush
from meshrl.services.engine.sglang.weight_transports import DiskTransport, ServerWeightTransport
from tests.load import scaled
from tests.unit.common.generation.engines_under_test import TINY, built_in, decoder, text_of

WIDE = -(-TINY.ffn_size // v0_5.INNER_ROWS) * v0_5.INNER_ROWS  # SGLang's MLP on a CPU
BETWEEN_S = 0.002  # two steps: a client has time to send a request
ANSWER_S = 60.0
ENDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


class Counterpart:
    """Server on loopback with its own loop and thread.

    `fails_at` is the tensor, in file order, at which its next update from disk fails. It then
    reports an error, as SGLang does for a broadcast. If it `ends`, the connection breaks and no
    request is answered any more, as SGLang ends at an invalid tensor of a file.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.fails_at = -1
        self.about: dict[str, Any] = {}  # description that it returns
        self.flips = ""  # the tensor of the next update in which one bit differs
        self.ends = self.ended = False
        self.takes_steps = math.inf  # steps with a request at work before it waits for another
        self._stepped = 0
        self.loses = ""  # path of calls that it handles, and whose answers are lost
        self.deaf = False  # it answers 500 to a pause, and continues
        self.engine = built_in("eager", slots, max_length)
        self.theirs = dict(state_to_hf(TINY, decoder().state_dict()))
        self.label, self.stands = "0", False
        self.calls: list[tuple[str, Any]] = []  # path and body of each request, in order
        self._numbers: dict[str, int] = {}  # of requests, by rid
        self._heard: dict[int, asyncio.Queue[RequestOutput]] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="counterpart", daemon=True).start()
        self.http: HttpClient = self.run(self._serve(slots))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(scaled(ANSWER_S))

    async def _serve(self, slots: int) -> HttpClient:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._serve_until_end])
        answers = {
            v0_5.PAUSE: self._pause,
            v0_5.CONTINUE: self._continue_generation,
            v0_5.ABORT: self._abort,
            v0_5.FROM_DISK: self._load,
            v0_5.RELEASE: self._release,
            v0_5.RESUME: self._nothing,
            v0_5.LOAD_ADAPTER: self._load_adapter,
            v0_5.UNLOAD_ADAPTER: self._unload_adapter,
            v0_5.WEIGHTS_CHECKER: self._read_back,
        }
        for path, answer in answers.items():
            app.router.add_post(path, answer)
        app.router.add_post(v0_5.GENERATE, self._generate)
        app.router.add_get(v0_5.INFO, self._info)
        app.router.add_get(v0_5.HEALTH, self._nothing)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._steps = asyncio.create_task(self._step())
        return HttpClient(f"http://127.0.0.1:{self._runner.addresses[0][1]}", slots)

    @web.middleware
    async def _serve_until_end(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.ended and request.transport is not None:
            request.transport.abort()
        if request.method == "POST":
            self.calls.append((request.path, await request.json()))
        answer: web.StreamResponse = await handler(request)
        if request.path == self.loses and request.transport is not None:
            request.transport.abort()
        return answer

    def get_exit_error(self) -> MeshError | None:
        """Return the exit error of its process."""
        return PeerLost("the server has ended") if self.ended else None

    async def _close(self) -> None:
        self._steps.cancel()
        await self.http.close()
        await self._runner.cleanup()

    def close(self) -> None:
        self.run(self._close())
        self.loop.call_soon_threadsafe(self.loop.stop)

    # -- generation -------------------------------------------------------------------------------

    async def _step(self) -> None:
        while True:
            if not self.stands and self._stepped < self.takes_steps:
                self._stepped += self.engine.step()
                self._drain()
            await asyncio.sleep(BETWEEN_S)

    def _drain(self) -> None:
        flush = self.engine.drain_outputs()
        if flush is None:
            return
        ends = np.cumsum(flush.counts)
        for i, number in enumerate(flush.ids.tolist()):
            part = slice(int(ends[i] - flush.counts[i]), int(ends[i]))
            piece = RequestOutput(
                number, flush.tokens[part], flush.logprobs[part], flush.versions[part]
            )
            piece.finish_reason = FinishReason(flush.finish_reasons[i])
            if number in self._heard:
                self._heard[number].put_nowait(piece)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            scored = self._score(body["input_ids"], body.get("lora_path", ""))
            return web.json_response({"meta_info": scored})
        how, number = body["sampling_params"], len(self._numbers)
        self._numbers[body["rid"]] = number
        heard = self._heard[number] = asyncio.Queue()
        generation_request = GenerationRequest(
            number,
            np.array(body["input_ids"], np.int32),
            how["max_new_tokens"],
            how["temperature"],
            tuple(how["stop_token_ids"]),
            how["sampling_seed"],
            -1,
            adapter=body.get("lora_path", ""),
        )
        self.engine.submit([generation_request])
        response = web.StreamResponse()
        await response.prepare(request)
        pairs: list[tuple[float, int, None]] = []
        finish, num_sent = FinishReason.RUNNING, 0
        try:
            while finish == FinishReason.RUNNING:
                piece = await heard.get()
                values = zip(piece.logprobs.tolist(), piece.tokens.tolist(), strict=True)
                pairs += [(logprob, token, None) for logprob, token in values]
                finish = piece.finish_reason
                unsent = len(pairs) - num_sent
                if not finish and num_sent > 0 and unsent < how["stream_interval"]:
                    continue
                num_sent = len(pairs)
                meta = {
                    "completion_tokens": len(pairs),
                    "output_token_logprobs": pairs,
                    "finish_reason": {"type": ENDS[finish]} if finish else None,
                    "weight_version": str(piece.versions[-1] if len(piece.versions) else 0),
                    "prompt_tokens": len(generation_request.tokens),
                }
                await response.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        finally:
            self.engine.abort([number])
        return response

    def _score(self, tokens: list[int], adapter: str) -> dict[str, Any]:
        scored = self.engine.score(np.array(tokens, np.int32), adapter).tolist()
        return {"input_token_logprobs": [(x, 0, None) for x in [0.0, *scored]]}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid, every = body["rid"], body.get("abort_all", False)
        self.engine.abort([n for name, n in self._numbers.items() if every or name == rid])
        self._drain()
        return web.Response()

    async def _release(self, request: web.Request) -> web.Response:
        """Lose the content of released weights, unless they are backed up."""
        tags = (await request.json())["tags"]
        if "weights" in tags and not v0_5.keeps_released_weights(self.about):
            self.engine.quarantine()
        return web.json_response({})

    # -- pauses and weights ----------------------------------------------------------------------

    async def _pause(self, request: web.Request) -> web.Response:
        if self.deaf:
            return web.Response(status=500)
        self.stands = True
        self._drain()
        return web.Response()

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self.stands = False
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.stands, "weights come between two steps"
        content = (Path(body["model_path"]) / "model.safetensors").read_bytes()
        for place, (name, tensor) in enumerate(load(content).items()):
            if place == self.fails_at:
                self.fails_at = -1
                if self.ends and request.transport is not None:
                    self.ended = self.stands = True
                    request.transport.abort()
                self._apply(self.engine.version)
                return web.json_response(
                    {"success": False, "message": f"{name} has no room"}, status=400
                )
            if name == self.flips:
                self.flips = ""
                tensor.view(-1).view(torch.int32)[tensor.numel() // 2] ^= 1
            self.theirs[name] = tensor.to(
                self.theirs[name].dtype
            )  # its dtype has space for the type
        self._apply(int(body["weight_version"]))
        return web.json_response({"success": True, "message": ""})

    def _apply(self, version: int) -> None:
        self.engine.update_weights(convert_to_builtin(self.theirs), version)

    # -- adapters --------------------------------------------------------------------------------

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Load an adapter under a new name, with all or none of the parts of a fused matrix."""
        body = await request.json()
        name, about = body["lora_name"], body["config_dict"]
        [content] = body["serialized_named_tensors"]
        theirs = pickle.loads(base64.b64decode(content))
        why = "" if name not in self.engine.adapter_versions else f"{name} is loaded already"
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if sum(part in about["target_modules"] for part in parts) not in (0, len(parts)):
                why = f"{about['target_modules']} lack some of {parts}"
        try:
            if not why:
                scale = about["lora_alpha"] / about["r"]
                self.engine.load_adapter(name, _convert_layer(theirs), scale, 0)
        except Refused as error:
            why = str(error)
        if why:
            return web.json_response({"success": False, "error_message": why}, status=400)
        return web.json_response({"success": True, "loaded_adapters": {name: "__tensor__"}})

    async def list_adapters(self) -> list[str]:
        """Return the names of its loaded adapters."""
        return list(self.engine.adapter_versions)

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        self.engine.unload_adapter((await request.json())["lora_name"])
        return web.json_response({"success": True})

    async def _read_back(self, request: web.Request) -> web.Response:
        """Return digests of its weights under the names of a server's fused matrices."""
        assert (await request.json())["action"] == "checksum"
        has = readback.to_server_layout(TINY, self.theirs)
        digests = {name: readback.compute_digest(tensor) for name, tensor in has}
        return web.json_response({"success": True, "ranks": [{"checksums": digests}]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.about)

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})


def convert_to_builtin(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a dense Hugging Face decoder."""
    state = {
        name: theirs[source] for name, source in GLOBAL_TENSOR_NAMES.items() if source in theirs
    }
    for layer in range(TINY.num_layers):
        own, prefix = f"layers.{layer}.", f"model.layers.{layer}."
        for name, source in LAYER_TENSOR_NAMES.items():
            if prefix + source in theirs:
                state[own + name] = theirs[prefix + source]
        for name, parts in get_fused_parts(TINY).items():
            if all(prefix + part in theirs for part in parts):
                state[own + name] = torch.cat([theirs[prefix + part] for part in parts])
    return state


def _convert_layer(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in theirs.items():
        layer, _, projection, factor = name.removeprefix("base_model.model.model.layers.").split(
            ".", 3
        )
        kind = "a" if factor.startswith("lora_A") else "b"
        if projection == "down_proj" and kind == "a":
            assert tensor.shape[1] == WIDE and not tensor[:, TINY.ffn_size :].any()
            tensor = tensor[:, : TINY.ffn_size]
        elif projection in ("gate_proj", "up_proj") and kind == "b":
            assert len(tensor) == WIDE and not tensor[TINY.ffn_size :].any()
            tensor = tensor[: TINY.ffn_size]
        found[f"layers.{layer}.adapters.{projection}.{kind}"] = tensor
    return found


def engine(
    server: Counterpart,
    directory: Path,
    slots: int,
    max_length: int,
    *,
    adapters: bool = True,
    read_back: bool = False,
    clock: Clock | None = None,
    transport: ServerWeightTransport | None = None,
    config: ModelConfig = TINY,
    stream_interval: int = 0,
    recompute: bool = False,
    memory: ServerMemory | None = None,
    memory_bytes: Mapping[str, int] | None = None,
) -> SGLangEngine:
    """Return an SGLang engine with the weights of `decoder()` loaded as version 0."""
    watch = HealthWatch(server.http, server.get_exit_error)
    way = transport or DiskTransport(server.http, directory)
    push = WeightPush(choose_server_transport(PushDevices()), way, clock=clock)
    control = ServerControl(server.http, watch, push, memory=memory)
    limits = config.token_id_end, slots, max_length, text_of, clock or SystemClock()
    requests = ServerRequests(server.http, *limits, stream_interval)
    served = ServerInfo(
        has_adapters=adapters,
        read_back=read_back,
        recompute_on_update=recompute,
        restarts_for_sleep=memory is not None and memory.forgets_state,
        memory_bytes=memory_bytes or {},
        keeps_weights=v0_5.keeps_released_weights(server.about),
    )
    made = SGLangEngine(server.http, control, config, requests, served)
    made.wake(decoder(config=config).state_dict(), 0)
    return made
