"""What is not trained leaves a run as it came: tokenizer, chat template, generation settings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.job.config import JobConfig, LoraConfig
from meshrl.common.model.files.rows import load_model
from meshrl.job.bundle import pack
from meshrl.services.trainer.models import lora
from meshrl.services.weights.export import write
from tests.unit.common.model.chatting import qwen3_tokenizer
from tests.unit.weights.test_export import Run, weights

pytestmark = pytest.mark.group("transformers")  # which one worker imports for all

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as `transformers` writes it, with files of its earlier versions."""
    import transformers

    place = tmp_path_factory.mktemp("hub") / "model"
    config = transformers.LlamaConfig(
        vocab_size=330,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=320,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[322, 320], do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.05
    )
    model.save_pretrained(place)
    qwen3_tokenizer(place)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=4096,
    )
    tokenizer.chat_template = {"default": CHAT, "tool_use": CHAT + "{{ tools | tojson }}"}
    tokenizer.save_pretrained(place)
    (place / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}\n')
    (place / "added_tokens.json").write_text('{"<|im_end|>": 322}\n')
    (place / "merges.txt").write_text("#version: 0.2\n")
    (place / "README.md").write_text("not of the tokenizer\n")
    return place


def exported(hub: Path, tmp_path: Path, adapters: LoraConfig) -> Path:
    """The model directory of a run that began from `hub`."""
    config = dataclasses.replace(
        JobConfig(lora=adapters),
        model=dataclasses.replace(JobConfig().model, path=str(hub)),
    )
    run = Run(tmp_path, config)
    bundle, document = pack(config, tmp_path, run.directory)
    (run.directory / "job.json").write_text(json.dumps({"job": "j", "document": document}))
    assert bundle.is_dir()
    _, decoder = load_model(hub)
    if adapters.rank:
        lora.adapt(decoder, adapters, seed=0)
    run.commit(0, weights(decoder), "initial")
    write(run.directory, tmp_path / "out", None, False)
    return tmp_path / "out"


@pytest.mark.parametrize("adapters", [LoraConfig(), LoraConfig(2)], ids=["whole", "adapters"])
def test_files_that_are_not_trained_are_exported_byte_by_byte(
    hub: Path, tmp_path: Path, adapters: LoraConfig
) -> None:
    import transformers

    out = exported(hub, tmp_path, adapters)
    names = {
        p.relative_to(hub)
        for p in hub.rglob("*")
        if p.is_file() and p.name not in ("config.json", "model.safetensors", "README.md")
    }
    assert {"chat_template.jinja", "generation_config.json", "tool_use.jinja"} <= {
        name.name for name in names
    }
    for name in names:
        assert (out / name).read_bytes() == (hub / name).read_bytes(), name
    own, was = (transformers.AutoTokenizer.from_pretrained(place) for place in (out, hub))
    messages = [{"role": "user", "content": "hé"}]
    offered: list[Any] = [None, [{"type": "function", "function": {"name": "add"}}]]
    for tools in offered:
        assert own.apply_chat_template(messages, tools=tools) == was.apply_chat_template(
            messages, tools=tools
        )
    assert own.special_tokens_map == was.special_tokens_map
    assert own.model_max_length == was.model_max_length == 4096
    generation = [transformers.GenerationConfig.from_pretrained(place) for place in (out, hub)]
    assert generation[0].to_dict() == generation[1].to_dict()
    assert generation[0].eos_token_id == [322, 320]


def test_an_absent_generation_config_stays_absent(hub: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(hub, bare)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (bare / name).unlink()
    out = exported(bare, tmp_path, LoraConfig())
    assert not (out / "generation_config.json").exists()
    assert not (out / "tokenizer_config.json").exists()
