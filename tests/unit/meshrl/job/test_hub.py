"""Models and datasets of the Hub, from a small server with its endpoints."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.job.hub.repository import Repository, is_hub_id
from tests.unit.meshrl.conftest import SHAPE
from tests.unit.meshrl.job.hub_server import Fault, HubServer

JOB = """\
[model]
path = "acme/tiny"

[dataset]
train = "acme/sums"
held_out = "acme/sums"
config = "main"
columns = { prompt = "question", gold = "extra.gold" }

[reward]
use = "exact"

[rollout]
max_tokens = 16
"""
ROWS: list[dict[str, Any]] = [
    {"question": f"{i}+1=", "answer": str(i + 1), "extra": {"gold": i + 1}} for i in range(9)
]
README = """\
---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train*}
  - {split: test, path: main/test*}
- config_name: hard
  data_files: hard/*
---
"""
DESCRIPTIONS = ("config.json", "tokenizer.json", "generation_config.json")
GATE = {"acme/gated", "acme/closed"}


def to_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def weights() -> bytes:
    """Return the weights of the shape of the tests' jobs."""
    shapes = {"embed_tokens": (16, 8), "norm": (8,)}
    shapes |= {f"layers.0.self_attn.{n}_proj": (8, 8) for n in "qkvo"}
    shapes |= {f"layers.0.mlp.{n}_proj": (16, 8) for n in ("gate", "up")}
    shapes |= {"layers.0.mlp.down_proj": (8, 16)}
    shapes |= {f"layers.0.{n}_layernorm": (8,) for n in ("input", "post_attention")}
    tensors = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    tensors["lm_head.weight"] = (16, 8)
    return save({name: np.full(shape, 0.1, np.float32) for name, shape in tensors.items()})


def split_weights(content: bytes) -> dict[str, bytes]:
    """Return two files with the tensors of one."""
    tensors = sorted(load(content).items())
    return {f"model-0000{i + 1}-of-00002.safetensors": save(dict(tensors[i::2])) for i in range(2)}


def write_repositories(hub: HubServer, scratch: Path) -> None:
    build_character_tokenizer("0123456789+=", scratch / "tokenizer.json")
    tokenizer = (scratch / "tokenizer.json").read_text()
    model: dict[str, bytes | str] = {
        "config.json": json.dumps(SHAPE),
        "generation_config.json": "{}",
        "tokenizer.json": tokenizer,
        "README.md": "a model",
        "model.safetensors": weights(),
        "pytorch_model.bin": "pickles",
        "onnx/config.json": "{}",
    }
    for name in ("tiny", "gated", "closed", "large"):
        hub.write(f"models/acme/{name}", model)
    parts = split_weights(weights())
    index = {"weight_map": {name: file for file, part in parts.items() for name in load(part)}}
    del model["model.safetensors"]
    own: dict[str, bytes | str] = {"model.safetensors.index.json": json.dumps(index), **parts}
    hub.write("models/acme/sharded", model | own | {"consolidated.safetensors": "once more"})
    hub.write("models/acme/pickles", model)
    hub.write("models/acme/notes", {"README.md": ""})
    hub.write(
        "datasets/acme/sums",
        {
            "README.md": README,
            "main/train.jsonl.gz": gzip.compress(to_lines(ROWS[:6]).encode(), mtime=0),
            "main/test.jsonl": to_lines(ROWS[6:]),
            "hard/all.json": json.dumps(ROWS[:2]),
        },
    )
    hub.write("datasets/acme/sums@v1", {"train.csv": "question,answer\n1+1=,2\n"})
    hub.write("datasets/acme/script", {"script.py": "", "data/train.jsonl": "{}"})
    hub.write("datasets/acme/pictures", {"train/a.png": "", "README.md": "no metadata"})
    hub.write("datasets/acme/empty", {".gitattributes": ""})


@dataclass
class Reader:
    """Process that reads a job against the server."""

    process: subprocess.Popen[str]
    job: Path
    hub: HubServer

    def read(self, *settings: str, **options: Any) -> dict[str, Any]:
        """Return what the process finds in the job with settings."""
        assert self.process.stdin and self.process.stdout
        request = {"path": str(self.job), "settings": settings, **options}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def start_reader(hub: HubServer, directory: Path, **env: str) -> Reader:
    job = directory / "job.toml"
    job.write_text(JOB)
    path = Path(__file__).parents[4]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.meshrl.job.hub_probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=path,
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(directory / "hf")} | env,
    )
    return Reader(process, job, hub)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """Serve the repositories of the tests."""
    root = tmp_path_factory.mktemp("hub")
    with HubServer(root, gated=set(GATE)) as server:
        write_repositories(server, root)
        yield server


@pytest.fixture(scope="module")
def shared_reader(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Start the process of the tests of this file."""
    reader = start_reader(hub, tmp_path_factory.mktemp("jobs"))
    yield reader
    reader.process.communicate()


@pytest.fixture
def reader(shared_reader: Reader) -> Reader:
    """Return the process, whose server has no faults and no counted requests."""
    shared_reader.hub.faults.clear()
    shared_reader.hub.requests.clear()
    return shared_reader


def read_requested_files(hub: HubServer) -> set[str]:
    return {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path}


def test_job_with_hub_ids_has_their_rows_and_descriptions(reader: Reader) -> None:
    found = reader.read()
    rows = [r | {"prompt": r["question"], "gold": r["extra"]["gold"]} for r in ROWS]
    assert found["rows"] == {"dataset.train": rows[:6], "dataset.held_out": rows[6:]}
    assert sorted(os.listdir(found["model"])) == sorted(DESCRIPTIONS)
    assert found["model"].endswith(found["revision"])
    portable = found["portable"]
    assert portable["model"]["path"] == "acme/tiny"
    assert portable["model"]["revision"] == found["revision"]
    assert [len(portable["dataset"][k]) for k in ("train", "revision")] == [9, 40]


def test_second_reading_fetches_no_file_again(reader: Reader) -> None:
    reader.read()
    reader.hub.requests.clear()
    reader.read()
    assert not read_requested_files(reader.hub)


def test_packed_job_has_weights_commits_and_no_token(reader: Reader) -> None:
    found = reader.read(pack=True, env={"HF_TOKEN": "hf_secret"})
    assert "model.safetensors" in found["files"] and "pytorch_model.bin" not in found["files"]
    origins = found["document"]["bundle"]["origins"]
    assert origins["model.path"] == {"repository": "acme/tiny", "commit": found["revision"]}
    assert set(origins) == {"model.path", "dataset.train", "dataset.held_out"}
    assert found["reloaded"].endswith("/model") and "hf_secret" not in json.dumps(found)


def test_sharded_model_is_packed_without_further_copies_of_its_weights(reader: Reader) -> None:
    found = reader.read("model.path=acme/sharded", pack=True)
    assert [name for name in found["files"] if name.endswith(".safetensors")] == [
        f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
    ]


def test_commit_stays_readable_when_its_branch_moves(reader: Reader) -> None:
    first = reader.read()
    pinned = f"dataset.revision={first['portable']['dataset']['revision']}"
    more = [*ROWS[6:], ROWS[0] | {"question": "9+9="}]
    reader.hub.write("datasets/acme/sums", {"main/test.jsonl": to_lines(more)})
    moved, kept = reader.read(), reader.read(pinned)
    reader.hub.write("datasets/acme/sums", {"main/test.jsonl": to_lines(ROWS[6:])})
    assert len(moved["rows"]["dataset.held_out"]) == 4
    assert kept["rows"] == first["rows"]


def test_other_revisions_configurations_and_formats_are_read(reader: Reader) -> None:
    tagged = reader.read("dataset.revision=v1", "dataset.config=", "dataset.held_out=",
                         'dataset.columns={prompt="question"}')  # fmt: skip
    assert tagged["rows"]["dataset.train"] == [
        {"question": "1+1=", "answer": "2", "prompt": "1+1="}
    ]
    hard = reader.read("dataset.config=hard", "dataset.held_out=")
    assert [row["prompt"] for row in hard["rows"]["dataset.train"]] == ["0+1=", "1+1="]


def test_local_path_has_priority_over_a_hub_id(reader: Reader) -> None:
    own = reader.job.parent / "acme/local"
    own.mkdir(parents=True)
    (own / "train.csv").write_text("question,answer\n1+1=,2\n")
    columns = 'dataset.columns={prompt="question"}'
    settings = ("dataset.train=acme/local", "dataset.held_out=", "dataset.config=", columns)
    found = reader.read(*settings)
    assert "error" not in found
    assert [row["prompt"] for row in found["rows"]["dataset.train"]] == ["1+1="]
    assert not any("/datasets/" in path for _, path in reader.hub.requests)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.path=acme/nope"], ["line 2", "is no path here, and no model of the Hub"]),
        (["model.path=acme/sums"], ["is a dataset of the Hub, not a model"]),
        (["dataset.train=acme/tiny"], ["is a model of the Hub, not a dataset"]),
        (["dataset.train=data/rows.jsonl"], ["there is no file", "data/rows.jsonl"]),
        (["model.revision=v9"], ["model.revision = 'v9'", "it has main", "commit of 40 digits"]),
        (["dataset.revision=v9"], ["dataset.revision = 'v9'", "it has main, v1"]),
        (["dataset.config=main2"], ["dataset.config = 'main2'", "it has main, hard"]),
        (["dataset.config="], ["dataset.config is missing", "it has main, hard"]),
        (["dataset.train_split=dev"], ["dataset.train_split = 'dev'", "it has train, test"]),
        (["dataset.held_out_split=dev"], ["dataset.held_out_split = 'dev'"]),
        (['dataset.columns={prompt="q"}'], ["train.jsonl.gz, line 1", "no 'q'", "'extra.gold'"]),
        (["dataset.train=acme/script"], ["needs its script script.py", "refs/convert/parquet"]),
        (["dataset.train=acme/pictures", "dataset.config="], ["a.png has none of the formats"]),
        (["dataset.train=acme/empty"], ["acme/empty", "finds no rows"]),
        (["model.path=acme/pickles"], ["no safetensors, but pickles of PyTorch"]),
        (["model.path=acme/notes"], ["no config.json"]),
        (["model.path=../local", "model.revision=v1"], ["needs a Hub id in model.path"]),
    ],
)
def test_mistake_names_the_key_and_what_exists(
    reader: Reader, settings: list[str], says: list[str]
) -> None:
    error = reader.read(*settings)["error"]
    key = settings[-1 if "revision" in settings[-1] else 0].partition("=")[0]
    assert key in error and all(text in error for text in says if text != "line 2"), error
    assert "--set" in error


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "is gated, and this host has no token. Request access on http"),
        ({"HF_TOKEN": "hf_other"}, "the user of this host's token has no access"),
    ],
)
def test_gated_repository_says_how_to_get_access(
    reader: Reader, env: dict[str, str], says: str
) -> None:
    error = reader.read("model.path=acme/closed", env=env)["error"]
    assert says in error and "hf_other" not in error


def test_gated_repository_opens_with_the_token(reader: Reader) -> None:
    found = reader.read("model.path=acme/gated", env={"HF_TOKEN": "hf_secret"})
    assert "models--acme--gated" in found["model"]


def test_interrupted_download_continues_where_it_stopped(reader: Reader) -> None:
    settings = ("model.path=acme/gated", "dataset.held_out=")
    env = {"HF_TOKEN": "hf_secret"}
    reader.read(*settings, env=env)
    reader.hub.faults += [Fault("GET /storage"), Fault("GET /storage", status=503)]
    reader.hub.sent_bytes = 0
    attempts = [reader.read(*settings, env=env, pack=True)]
    while "error" in attempts[-1] and len(attempts) < 4:  # versions of the Hub's client differ
        attempts.append(reader.read(*settings, env=env, pack=True))
    error = attempts[0]["error"]
    assert "model.path: acme/gated" in error and "the download of model.safetensors" in error
    assert "Repeat the command: it continues where the download stopped" in error
    assert "model.safetensors" in attempts[-1]["files"]
    assert reader.hub.sent_bytes < len(weights()) + 10_000


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("GET /api", 429, times=9, headers={"Retry-After": "60"}), "it asks to wait 60 s"),
        (Fault("GET /api", 503, times=9), "answered with the error 503"),
    ],
)
def test_busy_hub_is_told_unless_the_files_are_cached(
    reader: Reader, fault: Fault, says: str
) -> None:
    reader.read()
    reader.hub.faults.append(fault)
    error = reader.read("model.path=acme/uncached")["error"]
    assert says in error and "neither a path here nor in the Hub's cache" in error
    found = reader.read()
    assert says in found["notices"] and len(found["rows"]["dataset.train"]) == 6


def test_server_that_is_no_hub_is_told(reader: Reader) -> None:
    reader.hub.faults.append(Fault("GET /api", 404))
    error = reader.read()["error"]
    assert "does not answer as the Hub does" in error and "Check HF_ENDPOINT" in error


def test_download_that_exceeds_the_disk_is_refused_ahead(reader: Reader) -> None:
    reader.hub.claimed_sizes["model.safetensors"] = 10**16
    error = reader.read("model.path=acme/large", pack=True)["error"]
    reader.hub.claimed_sizes.clear()
    assert "needs 10000000.0 GB" in error and "HF_HOME" in error


def test_disk_that_becomes_full_says_what_to_do() -> None:
    from meshrl.job.hub import hub_errors  # takes a while, so it is not imported during collection

    repository = Repository("acme/tiny", "model", key="model.path")
    error = hub_errors.explain_error(repository, OSError(errno.ENOSPC, "full"), "a.safetensors")
    assert "became full" in error.message and "continues the download" in error.fix


def test_missing_package_is_named_with_its_extra(reader: Reader) -> None:
    error = reader.read(absent=["datasets"])["error"]
    assert "job.toml, line 5: dataset.train: acme/sums: the package datasets" in error
    assert "pip install 'meshrl[data]'" in error


def test_offline_job_sends_no_request(hub: HubServer, reader: Reader) -> None:
    reader.read()
    cache = str(reader.job.parent / "hf")
    offline = start_reader(hub, reader.job.parent, HF_HUB_OFFLINE="1", HF_HOME=cache)
    hub.requests.clear()
    found, error = offline.read(), offline.read("dataset.train=acme/absent")["error"]
    offline.process.communicate()
    assert not hub.requests and len(found["rows"]["dataset.held_out"]) == 3
    assert "HF_HUB_OFFLINE forbids requests" in error and "--repo-type dataset" in error


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("openai/gsm8k", True),
        ("data/train.jsonl", False),
        ("./models/tiny", False),
        ("/models/tiny", False),
        ("models/a/b", False),
        ("tiny", False),
        ("data/train-*", False),
    ],
)
def test_hub_ids_differ_from_paths(text: str, is_id: bool) -> None:
    assert is_hub_id(text) is is_id
