"""Sender of versions to an SGLang server, or to a receiver with its calls.

Run `stage DIRECTORY BYTES` first, then `push DIRECTORY BYTES TRANSPORT`. It prints a JSON line when
it is ready to push, and one after each push that a line of its input requests. With
`$MESHRL_SGLANG_PYTHON` the receiver is a real server. `serialised` is the file as it was written
before it was streamed: all tensors at once.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from loadtests.measuring.processes import served
from loadtests.measuring.shapes import shape
from meshrl.common.api.weights import Manifest, TensorPiece
from meshrl.common.base.clock import SystemClock
from meshrl.common.generation.builtin.loaded_weights import get_tensor_shapes
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import group_by_layer, state_to_hf
from meshrl.common.model.files.safetensors_writer import DTYPE_NAMES
from meshrl.common.weights.chunks.chunk_store import ChunkStore
from meshrl.common.weights.layout.version_image import VersionImage
from meshrl.services.engine.measurement.load_deadlines import Deadline
from meshrl.services.engine.sglang import weight_transports
from meshrl.services.engine.sglang.http_client import HttpClient
from meshrl.services.engine.sglang.launch_config import LaunchConfig
from meshrl.services.engine.sglang.server import SGLangServer
from meshrl.services.engine.sglang.server_tensors import ServerTensors
from meshrl.services.engine.sglang.transport_choice import PushDevices, choose_server_transport
from meshrl.services.engine.sglang.weight_push import WeightPush
from meshrl.services.engine.sglang.weight_transports import (
    DiskTransport,
    ServerWeightTransport,
    create_transport,
)

PUSH_S, START_S = 600.0, 900.0
RANKS = 2  # that have staged the version, each its rows
LAYER_BYTES = 2 * (3 * 768 * 768 + 3 * 768 * 2304)
EMBEDDING_BYTES = 2 * 4096 * 768
DRAWN = (1 << 20) - 3  # elements that are drawn; no two rows of a tensor are alike
BUCKET_BYTES = 16 << 20  # relative to the model as the default is to one of a GPU
PARAMETERS, PIECES = "parameters.safetensors", "pieces.json"  # of the receiver, of the version


def make_model(size_bytes: int) -> ModelConfig:
    """Return a model of some bytes in bfloat16; of 352 MiB a layer is 4 %, as of large ones."""
    layers = max(2, (size_bytes - EMBEDDING_BYTES) // LAYER_BYTES)
    return shape(768, layers, 2304, 4096, (12, 6), tie_embeddings=True)


def stage(directory: Path, model: ModelConfig) -> None:
    """Write a version, of which each rank has staged its rows by layer, and the parameters."""
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {
        name: drawn.repeat(-(-math.prod(size) // DRAWN))[: math.prod(size)].reshape(size)
        for name, size in get_tensor_shapes(model).items()
    }
    theirs = {name: t.contiguous() for name, t in state_to_hf(model, tensors).items()}
    save_file(theirs, directory / PARAMETERS)
    store, pieces = ChunkStore(directory / "chunks"), list[list[Any]]()
    for names in group_by_layer(tensors):
        for rank in range(RANKS):
            content, staged = bytearray(), list[list[Any]]()
            for name in names:
                flat = tensors[name].reshape(-1)
                begin, end = (len(flat) * one // RANKS for one in (rank, rank + 1))
                about = [name, DTYPE_NAMES[flat.dtype], list(tensors[name].shape)]
                size = (end - begin) * flat.element_size()
                staged.append([*about, "", len(content), size, 0, begin, end])
                content += flat[begin:end].view(torch.uint8).numpy().tobytes()
            digest = store.write(bytes(content))
            pieces += [[*piece[:3], digest, *piece[4:]] for piece in staged]
    (directory / PIECES).write_text(json.dumps(pieces))


def map_version(directory: Path) -> VersionImage:
    store, rows = ChunkStore(directory / "chunks"), json.loads((directory / PIECES).read_text())
    pieces = [TensorPiece(*row) for row in rows]
    image = VersionImage(Manifest("job", 0, 0, pieces, format=2))
    for digest in image.chunk_sizes:
        with store.chunk_path(digest).open("rb") as file:
            image.map_chunk(digest, file.fileno())
    return image


class SerialisedTransport(DiskTransport):
    """Transport as it was: it converts all tensors, serialises all, and writes the result."""

    def push(self, state: Any, version: int, flush_cache: bool, deadline: Deadline) -> None:
        theirs = state_to_hf(state._config, state._state)
        content = save({name: t.contiguous() for name, t in theirs.items()})
        weight_transports.write_file = lambda descriptor, state: write_all(descriptor, content)
        super().push({}, version, flush_cache, deadline)


def write_all(descriptor: int, content: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(content)


def make_transport(kind: str, http: HttpClient, place: Path) -> ServerWeightTransport:
    if kind == "serialised":
        return SerialisedTransport(http, place)
    return create_transport(choose_server_transport(PushDevices(), kind), http, place, 1)


def answer_orders(kind: str, directory: Path, model: ModelConfig, http: HttpClient) -> None:
    """Push the version once for each line of the input."""
    weight_transports.BUCKET_BYTES = BUCKET_BYTES
    image, transport = map_version(directory), make_transport(kind, http, directory / kind)
    push = WeightPush(choose_server_transport(PushDevices()), transport, floor_s=PUSH_S)
    print(json.dumps({"model_bytes": image.size_bytes}), flush=True)
    for number, _ in enumerate(sys.stdin):
        began_s = time.monotonic()
        push.push(ServerTensors(model, image.tensors), number, False)
        print(json.dumps({"took_s": time.monotonic() - began_s}), flush=True)
    push.close()


async def serve_pushes(kind: str, directory: Path, model: ModelConfig) -> None:
    if python := os.environ.get("MESHRL_SGLANG_PYTHON"):
        how = LaunchConfig(python, directory / f"server-{kind}", 4, 128, dtype="bfloat16")
        about = SystemHost(), SystemClock(), how, model
        server = await SGLangServer.start(*about, "auto", deadline_s=START_S)
        try:
            await asyncio.to_thread(answer_orders, kind, directory, model, server.http)
        finally:
            await server.stop()
        return
    receiver = "loadtests.weights.members.sglang_receiver"
    with served(receiver, str(directory / PARAMETERS)) as (_, port):
        http = HttpClient(f"http://127.0.0.1:{port}", 4)
        await asyncio.to_thread(answer_orders, kind, directory, model, http)
        await http.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, of_size = Path(sys.argv[2]), make_model(int(sys.argv[3]))
    if sys.argv[1] == "stage":
        stage(place, of_size)
    else:
        asyncio.run(serve_pushes(sys.argv[4], place, of_size))
