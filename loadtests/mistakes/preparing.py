"""Preparations of a mistake beyond files, by name: changes of its folder, or context managers for
conditions.

Changes of the model and the tokenizer, conditions of the host (ports, servers, an interpreter, room
on a disk), and runs that the command is about: finished, under way, incomplete or corrupt.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loadtests.measuring.processes import environment, small_disk
from loadtests.mistakes.job import Place
from loadtests.mistakes.mistake import NotPreparedError

_FILE = "model/model.safetensors"
_TOKENIZER = "model/tokenizer.json"
_PASSWORD = "secret"
_RUN = "runs/mine"
_APPEND_ONLY = f"{_RUN}/mesh/redis/appendonlydir"
_BEGUN_S = 120.0  # for a run that is prepared


def _change_matrices(place: Place, dtype: str) -> None:
    """Store every matrix of a layer in another type, as quantized checkpoints do."""
    tensors = place.weights()
    layers = {name for name in tensors if ".layers." in name and tensors[name].dim() == 2}
    other = getattr(torch, dtype)
    place.save_weights({n: t.to(other) if n in layers else t for n, t in tensors.items()})


def _truncate(place: Place) -> None:
    file = place.path(_FILE)
    file.write_bytes(file.read_bytes()[:-1000])


def _drop_shard(place: Place) -> None:
    tensors = place.weights()
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    place.path(_FILE).rename(place.path("model/model-00001-of-00002.safetensors"))
    place.write("model/model.safetensors.index.json", json.dumps({"weight_map": names}))


def _set_nan(place: Place) -> None:
    tensors = place.weights()
    tensors["model.norm.weight"][3] = float("nan")
    place.save_weights(tensors)


def _drop_tensor(place: Place) -> None:
    tensors = place.weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    place.save_weights(tensors)


def _add_tensor(place: Place, name: str, *shape: int) -> None:
    place.save_weights(place.weights() | {name: torch.ones(shape)})


def _add_token(place: Place, number: int) -> None:
    content = json.loads(place.path(_TOKENIZER).read_text())
    content["model"]["vocab"]["far"] = number
    place.write(_TOKENIZER, json.dumps(content))


def _add_small_reference(place: Place) -> None:
    """Add a reference whose head has fewer rows than the tokenizer has ids."""
    shutil.copytree(place.path("model"), place.path("reference"))
    file = place.path("reference/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 40}))
    file = place.path("reference/model.safetensors")
    name = "model.embed_tokens.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:40].clone()}, file, metadata={"format": "pt"})


def _take_port(place: Place, port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def _serve_web(place: Place, port: int) -> AbstractContextManager[None]:
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    return _serving(argv, port)


def _serve_redis(place: Place, port: int) -> AbstractContextManager[None]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise NotPreparedError("apt-get install redis-server")
    argv = [program, "--port", str(port), "--requirepass", _PASSWORD, "--save", ""]
    return _serving(argv, port)


@contextmanager
def _serving(argv: list[str], port: int, cwd: str = "/") -> Iterator[None]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(argv, stdout=quiet, stderr=quiet, cwd=cwd) as server:
        try:
            for _ in range(1000):
                with socket.socket() as probe:
                    probe.settimeout(0.1)
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield
        finally:
            server.terminate()


def _mount_small_disk(place: Place, size_kb: int) -> AbstractContextManager[None]:
    """Make `runs` a file system that holds a start and not a run."""
    place.path("runs").mkdir()
    return small_disk(place.path("runs"), f"{size_kb}k")


def _write_unexecutable(place: Place) -> None:
    place.write("python", "#!/bin/sh\n")
    os.chmod(place.path("python"), 0o644)


def _use_own_interpreter(place: Place) -> None:
    """Configure this interpreter for SGLang, which it lacks."""
    place.set({"rollout.engine": "sglang", "rollout.sglang_python": sys.executable})


def _meshrl(place: Place, *argv: str) -> subprocess.Popen[bytes]:
    log = (place.root.parent / "prepared.log").open("ab")
    command = [sys.executable, "-m", "meshrl", *argv]
    return subprocess.Popen(command, cwd=place.root, env=environment(), stdout=log, stderr=log)


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise NotPreparedError(why)


def _finish(place: Place) -> None:
    """Make a run that has ended, its two steps trained."""
    status = _meshrl(place, "run", "job.toml").wait(_BEGUN_S)
    _require(status == 0, (place.root.parent / "prepared.log").read_text()[-500:])


@contextmanager
def _keep_running(place: Place) -> Iterator[None]:
    """Make a run that is under way, and must be at the end."""
    place.set({"budget.steps": 10_000})
    program = _meshrl(place, "run", "job.toml")
    metrics = place.path(f"{_RUN}/metrics.jsonl")
    deadline = time.monotonic() + _BEGUN_S
    while not metrics.is_file() or not metrics.stat().st_size:
        _require(program.poll() is None and time.monotonic() < deadline, "the run does not begin")
        time.sleep(0.1)
    try:
        yield
        _require(program.poll() is None, "the run did not survive")
        steps = len(metrics.read_text().splitlines())
        deadline = time.monotonic() + _BEGUN_S
        while len(metrics.read_text().splitlines()) <= steps:
            _require(program.poll() is None and time.monotonic() < deadline, "it does not go on")
            time.sleep(0.1)
    finally:
        program.send_signal(signal.SIGINT)
        program.wait(_BEGUN_S)


def _drop_files(place: Place, *names: str) -> None:
    """Make a finished run with missing files."""
    _finish(place)
    for name in names:
        found = list(place.path(_RUN).glob(name))
        _require(bool(found), f"a run has no {name}")
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _edit_job(place: Place, keys: Mapping[str, Any]) -> None:
    """Make a finished run whose job file has changed since."""
    _finish(place)
    place.set(keys)


def _link(place: Place) -> None:
    """Make `runs/mine` a link to a folder of the user's."""
    place.write("thesis/chapter.tex", "years of work\n")
    place.path("runs").mkdir()
    place.path(_RUN).symlink_to(place.path("thesis"))


def _corrupt_redis(place: Place, harm: str) -> None:
    """Make a finished run whose Redis data is missing, or has a bit flipped."""
    _finish(place)
    folder = place.path(_APPEND_ONLY)
    if harm == "missing":
        shutil.rmtree(folder)
    else:
        [file] = folder.glob("*.incr.aof")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


@contextmanager
def _serve_hub(place: Place, port: int) -> Iterator[None]:
    """Serve a Hub: the trial's model as acme/tiny, gated acme/secret, and datasets acme/sums."""
    hub = place.root.parent / "hub"
    for name in ("acme/tiny", "acme/secret"):
        shutil.copytree(place.path("model"), hub / "models" / name)
    (hub / "models/acme/pickles").mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(place.path(f"model/{name}"), hub / "models/acme/pickles")
    (hub / "models/acme/pickles/pytorch_model.bin").write_bytes(b"PK")
    rows = [json.loads(line) for line in place.path("train.jsonl").read_text().splitlines()]
    asked = "".join(
        json.dumps({"question": row["prompt"], "answer": row["answer"]}) + "\n" for row in rows
    )
    for split in ("train", "test"):
        file = hub / f"datasets/acme/sums/{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(asked)
    script = hub / "datasets/acme/script/script.py"
    script.parent.mkdir()
    script.write_text("import datasets\n")
    module = "tests.unit.meshrl.job.hub_server"
    argv = [sys.executable, "-m", module, f"--root={hub}", f"--port={port}", "--gated=acme/secret"]
    with _serving(argv, port, cwd=str(Path(__file__).parents[2])):
        yield


PREPARATIONS: Mapping[str, Callable[..., AbstractContextManager[object] | None]] = {
    "matrices": _change_matrices,
    "truncated_weights": _truncate,
    "missing_shard": _drop_shard,
    "nan_weight": _set_nan,
    "missing_tensor": _drop_tensor,
    "further_tensor": _add_tensor,
    "further_token": _add_token,
    "small_reference": _add_small_reference,
    "taken_port": _take_port,
    "web_server": _serve_web,
    "redis_server": _serve_redis,
    "hub": _serve_hub,
    "small_disk": _mount_small_disk,
    "not_executable": _write_unexecutable,
    "own_interpreter": _use_own_interpreter,
    "finished_run": _finish,
    "live_run": _keep_running,
    "run_without": _drop_files,
    "edited_job": _edit_job,
    "linked_run": _link,
    "corrupt_redis": _corrupt_redis,
}
