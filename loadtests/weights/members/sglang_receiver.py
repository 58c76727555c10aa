"""Receiver of weights with the calls of an SGLang server, and with the steps of its loader.

It has the model's parameters, and copies into them from what it maps: a safetensors file, or a
bucket by its handle. Run it with the path of a file of the parameters; it prints its port.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

from meshrl.services.engine.sglang import v0_5


class Receiver:
    def __init__(self, initial: Path) -> None:
        self.parameters = {name: tensor.clone() for name, tensor in load_file(initial).items()}

    def copy(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def load_file(self, body: dict[str, Any]) -> None:
        [path] = Path(body["model_path"]).glob("*.safetensors")
        self.copy(load_file(path))  # as views of the mapped file

    def load_bucket(self, body: dict[str, Any]) -> None:
        found = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        flat = found["flattened_tensor"]
        pieces = {
            one.name: flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape)
            for one in found["metadata"]
        }
        self.copy(pieces)

    def end_step(self, body: dict[str, Any]) -> None:
        """Do nothing at the start and the end of an update."""


async def serve(receiver: Receiver) -> None:
    app = web.Application()
    answers = {
        v0_5.FROM_DISK: receiver.load_file,
        v0_5.FROM_TENSORS: receiver.load_bucket,
        v0_5.BEGIN_UPDATE: receiver.end_step,
        v0_5.END_UPDATE: receiver.end_step,
        v0_5.VERSION: receiver.end_step,
    }
    for path, answer in answers.items():
        app.router.add_post(path, _as_handler(answer))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def _as_handler(answer: Callable[[dict[str, Any]], None]) -> Any:
    async def handle(request: web.Request) -> web.Response:
        answer(await request.json())
        return web.json_response({"success": True})

    return handle


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Receiver(Path(sys.argv[1]))))
