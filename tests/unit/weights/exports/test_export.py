"""Export of a run's versions as Hugging Face directories."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshrl.common.api.weights import Manifest
from meshrl.common.api.weights import TensorPiece as Described
from meshrl.common.base.encoding.blob import unpack
from meshrl.common.base.errors import CorruptData, NotFound, Refused
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import JobConfig, LoraConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.files.safetensors_writer import DTYPE_NAMES
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.common.records.checkpoints import (
    STATE_FOLDER,
    compute_file_digests,
    format_checkpoint_name,
)
from meshrl.common.weights.bulk.port import ChunkStore
from meshrl.common.weights.layout.manifest import encode_manifest
from meshrl.common.weights.version_writer import write_version
from meshrl.job.bundle import pack_bundle
from meshrl.services.trainer.models import lora
from meshrl.services.weights.export import export_below, export_selected, select_version
from meshrl.services.weights.versions.run_versions import StoredVersion, list_versions
from tests.attention import causal_attention
from tests.unit.common.base.files.harms import flip
from tests.unit.common.model.chatting import qwen3_tokenizer

SHAPE = ModelConfig(
    architecture="llama",
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=24,
    tie_embeddings=True,
    max_positions=64,
)
TOKENS = torch.arange(10)[None]


def model(seed: int) -> Decoder:
    decoder = Decoder(SHAPE)
    decoder.initialise(torch.Generator().manual_seed(seed))
    return decoder


def weights(decoder: Decoder) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in decoder.named_parameters()}


def logits(decoder: Decoder) -> Tensor:
    with torch.inference_mode():
        return decoder.compute_logits(decoder(TOKENS, torch.arange(10)[None], causal_attention))


class Run:
    """Run directory as services and the recorder write it."""

    def __init__(self, directory: Path, config: JobConfig) -> None:
        self.directory = directory / "run"
        bundle = directory / "bundle"
        bundle.mkdir(parents=True)
        self.directory.mkdir()
        build_character_tokenizer("0123456789+-= ", str(bundle / "tokenizer.json"))
        document = config.to_document() | {"bundle": {"dir": str(bundle), "digest": "0"}}
        (self.directory / "job.json").write_text(json.dumps({"job": "j", "document": document}))
        self.chunks = ChunkStore(self.directory / "store")

    def store(self, tensors: dict[str, Tensor], version: int) -> str:
        specs, content = [], b""
        for name, tensor in tensors.items():
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            span = (len(content), len(raw), 0, 0, tensor.numel())
            specs.append((name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), span))
            content += raw
        chunk = self.chunks.write(content)
        pieces = [Described(n, d, s, chunk, *span) for n, d, s, span in specs]
        return self.chunks.write(encode_manifest(Manifest("j", 0, version, pieces)))

    def list_chunks(self, manifest: str) -> set[str]:
        return {tensor.chunk for tensor in unpack(Manifest, self.chunks.read(manifest)).tensors}

    def event(self, kind: str, **fields: Any) -> None:
        with (self.directory / "events.jsonl").open("a") as file:
            file.write(json.dumps({"id": "1-0", "ms": 0, "kind": kind, "fields": fields}) + "\n")

    def commit(self, version: int, tensors: dict[str, Tensor], kind: str = "step") -> str:
        digest = self.store(tensors, version)
        self.event(kind, job="j", version=version, step=version, manifest=digest)
        return digest


CONFIG = JobConfig(
    model=dataclasses.replace(JobConfig().model, config=SHAPE.to_hf()),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    new_run = Run(tmp_path, CONFIG)
    for version in range(4):
        new_run.commit(version, weights(model(version)), "initial" if version == 0 else "step")
    return new_run


def test_each_version_is_exported_to_its_own_directory(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "exports"
    first = export_below(run.directory, root, None, False)
    assert export_below(run.directory, root, 2, False) != first
    stat_before = (first / "model.safetensors").stat()
    assert export_below(run.directory, root, 3, False) == first
    assert (first / "model.safetensors").stat() == stat_before
    assert torch.equal(logits(load_model(first)[1]), logits(model(3)))


def test_version_with_corrupt_chunks_is_exported_from_its_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    job = json.loads((run.directory / "job.json").read_text())
    data = JobData.from_document(job["job"], job["document"], str(run.directory))
    tensors, manifest = weights(model(3)), list_versions(run.directory)[-1].manifest_digest
    checkpoint = run.directory / "checkpoints" / format_checkpoint_name(0, 3, manifest)
    write_version(data, SHAPE, tensors, checkpoint, checkpoint)
    (checkpoint / STATE_FOLDER).mkdir()
    (checkpoint / STATE_FOLDER / "shard.safetensors").write_bytes(b"state")
    record = {
        "lineage": 0,
        "step": 3,
        "weights": manifest,
        "files": compute_file_digests(checkpoint),
    }
    Path(f"{checkpoint}.json").write_bytes(encode_sealed(record))
    [chunk] = {t.chunk for t in unpack(Manifest, run.chunks.read(manifest)).tensors}
    flip(run.chunks.chunk_path(chunk), b"")
    out = tmp_path / "out"
    assert export_selected(run.directory, out, None, False).step == 3
    assert torch.equal(logits(load_model(out)[1]), logits(model(3)))
    assert not (out / STATE_FOLDER).exists()
    flip(checkpoint / "model.safetensors", b"")
    with pytest.raises(CorruptData):
        export_selected(run.directory, out, None, False)


def test_last_version_is_exported_as_a_loadable_model(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export_selected(run.directory, out, None, False).step == 3
    _, loaded = load_model(out)
    assert torch.equal(logits(loaded), logits(model(3)))
    assert (out / "tokenizer.json").is_file()
    assert not (tmp_path / "out.partial").exists() and not (out / "adapter").exists()


def test_any_stored_version_can_be_exported(run: Run, tmp_path: Path) -> None:
    export_selected(run.directory, tmp_path / "out", 1, False)
    _, loaded = load_model(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model(1)))


def test_error_for_a_missing_version_lists_the_stored_ones(run: Run) -> None:
    removed = list_versions(run.directory)[1]
    run.chunks.chunk_path(removed.manifest_digest).unlink()
    with pytest.raises(NotFound, match=r"step 1\. Choose one of 0, 2, 3"):
        select_version(run.directory, 1)
    assert select_version(run.directory).step == 3


def test_version_with_a_missing_chunk_is_not_selected(run: Run) -> None:
    last = list_versions(run.directory)[-1]
    for path in run.chunks.directory.glob("??/*"):
        if path.name != last.manifest_digest and path.stat().st_size > 10_000:
            path.unlink()
    with pytest.raises(NotFound, match="no version"):
        select_version(run.directory)


def test_steps_of_an_abandoned_lineage_are_not_listed(run: Run) -> None:
    base = list_versions(run.directory)[1]
    run.event("lineage", job="j", version=1, manifest=base.manifest_digest)
    assert select_version(run.directory) == base
    digest = run.commit(2, weights(model(9)))
    assert [v.step for v in list_versions(run.directory)] == [0, 1, 2]
    assert select_version(run.directory, 2) == StoredVersion(2, digest)


def test_best_version_is_the_one_named_by_evaluation(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"evaluation\.best"):
        select_version(run.directory, want_best=True)
    second = list_versions(run.directory)[2]
    fields = {"best": True, "value": 0.5, "manifest": second.manifest_digest}
    run.event("evaluation", job="j", tag="step-2", step=2, **fields)
    run.event("evaluation", job="j", tag="step-3", step=3, best=False, manifest="")
    export_selected(run.directory, tmp_path / "out", None, True)
    _, loaded = load_model(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model(2)))


def test_partially_written_event_is_ignored(run: Run) -> None:
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"id": "2-0", "kind": "st')
    assert select_version(run.directory).step == 3


def test_corrupt_event_is_skipped(run: Run, tmp_path: Path) -> None:
    events = run.directory / "events.jsonl"
    lines = events.read_bytes().split(b"\n")
    lines[1] = b"\0" * len(lines[1])
    events.write_bytes(b"\n".join(lines))
    assert [v.step for v in list_versions(run.directory)] == [0, 2, 3]
    assert export_selected(run.directory, tmp_path / "out", None, False).step == 3


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b'{"job": "j", "docu', "not JSON"),
        (b"{}", "lacks the name or the document of the job"),
        (b'{"job": "j", "document": {}, "check": "0000000000000000"}', "match its checksum"),
    ],
)
def test_error_names_a_corrupt_job_file(run: Run, tmp_path: Path, content: bytes, why: str) -> None:
    (run.directory / "job.json").write_bytes(content)
    with pytest.raises(CorruptData, match=why) as raised:
        export_selected(run.directory, tmp_path / "out", None, False)
    assert str(run.directory / "job.json") in str(raised.value)


def test_corrupt_checkpoint_is_skipped_without_an_event_record(run: Run) -> None:
    (run.directory / "events.jsonl").unlink()
    checkpoints = run.directory / "checkpoints"
    checkpoints.mkdir()
    for step in (1, 2):
        digest = run.store(weights(model(step)), step)
        path = checkpoints / f"{format_checkpoint_name(0, step, digest)}.json"
        path.write_bytes(
            encode_sealed({"lineage": 0, "step": step, "weights": digest, "files": {}})
        )
    flip(path, b"")
    assert [v.step for v in list_versions(run.directory)] == [1]


def test_export_replaces_only_an_export(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_selected(run.directory, out, 1, False)
    export_selected(run.directory, out, 2, False)
    assert torch.equal(logits(load_model(out)[1]), logits(model(2)))
    assert json.loads((out / "meshrl.json").read_text())["step"] == 2
    base = tmp_path / "base"
    save_model(base, SHAPE, weights(model(7)))
    scratch = tmp_path / "new.partial"
    scratch.mkdir()
    (scratch / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("base", "new", "file"):
        with pytest.raises(Refused, match="is not the directory of an export"):
            export_selected(run.directory, tmp_path / name, None, False)
    assert torch.equal(logits(load_model(base)[1]), logits(model(7)))
    assert (scratch / "thesis.txt").is_file() and (tmp_path / "file").is_file()
    (tmp_path / "empty").mkdir()
    export_selected(run.directory, tmp_path / "empty", 1, False)
    assert torch.equal(logits(load_model(tmp_path / "empty")[1]), logits(model(1)))


@pytest.mark.group("transformers")  # imported by one worker for all tests of the group
def test_adapter_run_is_exported_merged_and_for_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    config = LoraConfig(2, 8.0)
    run = Run(tmp_path, dataclasses.replace(CONFIG, lora=config))
    adapted = model(0)
    lora.initialize_adapters(adapted, config, seed=0)
    run.commit(0, weights(adapted), "initial")
    with torch.no_grad():
        for name, parameter in lora.get_trainable_parameters(adapted).items():
            if name.endswith(".b"):
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    run.commit(1, weights(adapted))
    out = tmp_path / "out"
    export_selected(run.directory, out, None, False)
    expected = logits(adapted)
    assert not torch.allclose(expected, logits(model(0)), atol=1e-2)
    assert torch.allclose(logits(load_model(out)[1]), expected, atol=1e-5)
    adapter_config = json.loads((out / "adapter/adapter_config.json").read_text())
    base = transformers.AutoModelForCausalLM.from_pretrained(
        adapter_config["base_model_name_or_path"]
    )
    loaded = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    with torch.inference_mode():
        assert torch.allclose(loaded(TOKENS).logits, expected, atol=1e-5)


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory as `transformers` writes it, with files of its earlier versions."""
    import transformers

    directory = tmp_path_factory.mktemp("hub") / "model"
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
    model.save_pretrained(directory)
    qwen3_tokenizer(directory)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=4096,
    )
    tokenizer.chat_template = {"default": CHAT, "tool_use": CHAT + "{{ tools | tojson }}"}
    tokenizer.save_pretrained(directory)
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}\n')
    (directory / "added_tokens.json").write_text('{"<|im_end|>": 322}\n')
    (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "README.md").write_text("not of the tokenizer\n")
    return directory


def export_run(hub: Path, tmp_path: Path, adapters: LoraConfig) -> Path:
    """Export a run that began from `hub`, and return the directory."""
    config = dataclasses.replace(
        JobConfig(lora=adapters),
        model=dataclasses.replace(JobConfig().model, path=str(hub)),
    )
    run = Run(tmp_path, config)
    bundle, document = pack_bundle(config, tmp_path, run.directory)
    (run.directory / "job.json").write_text(json.dumps({"job": "j", "document": document}))
    assert bundle.is_dir()
    _, decoder = load_model(hub)
    if adapters.rank:
        lora.initialize_adapters(decoder, adapters, seed=0)
    run.commit(0, weights(decoder), "initial")
    export_selected(run.directory, tmp_path / "out", None, False)
    return tmp_path / "out"


@pytest.mark.group("transformers")
@pytest.mark.parametrize("adapters", [LoraConfig(), LoraConfig(2)], ids=["whole", "adapters"])
def test_untrained_files_are_exported_unchanged(
    hub: Path, tmp_path: Path, adapters: LoraConfig
) -> None:
    import transformers

    out = export_run(hub, tmp_path, adapters)
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
    exported_tokenizer, original_tokenizer = (
        transformers.AutoTokenizer.from_pretrained(directory) for directory in (out, hub)
    )
    messages = [{"role": "user", "content": "hé"}]
    tool_sets: list[Any] = [None, [{"type": "function", "function": {"name": "add"}}]]
    for tools in tool_sets:
        assert exported_tokenizer.apply_chat_template(
            messages, tools=tools
        ) == original_tokenizer.apply_chat_template(messages, tools=tools)
    assert exported_tokenizer.special_tokens_map == original_tokenizer.special_tokens_map
    assert exported_tokenizer.model_max_length == original_tokenizer.model_max_length == 4096
    generation = [
        transformers.GenerationConfig.from_pretrained(directory) for directory in (out, hub)
    ]
    assert generation[0].to_dict() == generation[1].to_dict()
    assert generation[0].eos_token_id == [322, 320]


@pytest.mark.group("transformers")
def test_absent_generation_config_stays_absent(hub: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(hub, bare)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (bare / name).unlink()
    out = export_run(bare, tmp_path, LoraConfig())
    assert not (out / "generation_config.json").exists()
    assert not (out / "tokenizer_config.json").exists()
