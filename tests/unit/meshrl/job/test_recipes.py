"""Dry runs of the recipes with small models of the same architecture, from a local Hub server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshrl.job_template.job_creation import RECIPE_MODULES, create_job
from tests.load import scaled
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.meshrl.job.hub_server import HubServer

RECIPES = Path(__file__).parents[4] / "examples/recipes"
PAGE = RECIPES.parents[1] / "docs/use/recipes.md"
LAYER = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (64, 64)),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (32, 64)),
    **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (32,)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (128, 64)),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (64,)),
    "mlp.down_proj": (64, 128),
}
MODELS = ("Qwen3-0.6B", "Qwen3-0.6B-Base", "Qwen3-1.7B", "Qwen3-4B-Instruct-2507", "Qwen3-8B-Base")
MATHS = [{"prompt": f"Compute {n} + 1.", "solution": str(n + 1)} for n in range(4)]
DATASETS: dict[str, dict[str, list[dict[str, Any]]]] = {  # files by repository
    "openai/gsm8k": {
        f"main/{split}.jsonl": [
            {"question": f"{n} plus {k}?", "answer": f"Add. #### {n + k}"} for n in range(4)
        ]
        for k, split in enumerate(("train", "test"))
    },
    "open-r1/DAPO-Math-17k-Processed": {"en/train.jsonl": MATHS},
    "HuggingFaceH4/aime_2024": {
        "data/train.jsonl": [{"problem": "Compute 7 x 7.", "solution": "By hand.", "answer": 49}]
    },
    "google-research-datasets/mbpp": {
        f"full/{split}.jsonl": [
            {"text": f"Add {k}.", "test_list": [f"assert add(1) == {k + 1}", "assert add(-1)"]}
        ]
        for k, split in enumerate(("train", "test"))
    },
    "meta-math/MetaMathQA": {"train.jsonl": [{"query": "One plus one?", "response": "It is 2."}]},
}
CHILD = """
import json, sys
from typer.testing import CliRunner
from meshrl.cli import app
found = {}
for path, settings in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(app, ["run", path, "--dry-run", *settings])
    found[path] = result.exit_code, result.stdout, f"{result.stderr}{result.exception or ''}"
print(json.dumps(found))
"""


def write_model(directory: Path) -> None:
    """Write a Qwen3 model of two layers with the keys of the published ones."""
    directory.mkdir(parents=True)
    vocabulary = qwen3_tokenizer(directory).vocab_size
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"embed_tokens": (vocabulary, 64), "norm": (64,)}
    shapes |= {f"layers.{layer}.{name}": shape for layer in (0, 1) for name, shape in LAYER.items()}
    tensors = {f"model.{name}.weight": torch.zeros(s).bfloat16() for name, s in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def write_card(repository: Path, names: Iterable[str]) -> None:
    """Write the dataset card, which lists a configuration for each folder of files."""
    configurations = {name.partition("/")[0] for name in names if "/" in name} - {"data"}
    lines = [
        f"- config_name: {name}\n  data_files:\n"
        + "".join(
            f"  - split: {path.stem}\n    path: {name}/{path.name}\n"
            for path in sorted((repository / name).iterdir())
        )
        for name in sorted(configurations)
    ]
    if lines:
        (repository / "README.md").write_text("---\nconfigs:\n" + "".join(lines) + "---\n")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.rotating(3)
def test_every_recipe_passes_its_dry_run(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    for model in MODELS:
        write_model(hub / "models/Qwen" / model)
    for repository, files in DATASETS.items():
        for name, rows in files.items():
            write_rows(hub / "datasets" / repository / name, rows)
        write_card(hub / "datasets" / repository, files)
    write_model(tmp_path / "runs/sft/model")  # the export that rl-after-sft.toml starts from
    jobs = {}
    for name in RECIPE_MODULES:
        if name == "verifiers":  # needs an interpreter of its own
            continue
        create_job(tmp_path / name, name)
        settings = ["mesh.device=cpu", *(["rollout.engine=torch"] if name == "dapo-math" else [])]
        jobs[str(tmp_path / f"{name}/{name}.toml")] = [
            part for s in settings for part in ("--set", s)
        ]
    with HubServer(hub) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache")}
        result = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(jobs)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
            timeout=scaled(60),
            check=False,
        )
    assert result.returncode == 0, result.stderr
    for path, (code, toml, told) in json.loads(result.stdout.splitlines()[-1]).items():
        assert code == 0, f"{Path(path).name}: {told}"
        assert "# chosen: config.json has bfloat16" in toml
        assert "estimated memory of each process" in told


@pytest.mark.parametrize("recipe", RECIPE_MODULES)
def test_recipe_states_memory_time_and_curve(recipe: str) -> None:
    text = (RECIPES / f"{recipe}.toml").read_text()
    for what in ("Hardware", "Memory, estimated", "Time, not measured", "Curve, not measured"):
        assert f"# {what}" in text
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{recipe}` |")]
    assert len(rows) == 2  # of hardware and of curves
