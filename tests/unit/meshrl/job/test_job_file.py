"""Job files: reading, bundling and edits after the start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.bundle.bundle_files import compute_digest, list_files
from meshrl.common.job.config import JobConfig
from meshrl.common.job.schema import JOB_SCHEMA
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.state.pool.demand.requirements import derive_requirements
from meshrl.job.bundle import pack_bundle
from meshrl.job.defaults.differences import select_differences
from meshrl.job.edited_job_file import describe_edits, record_job_file
from meshrl.job.job_file import get_value
from meshrl.job.job_reader import apply_override, load_config, read_job_file
from meshrl.job.model_files import count_parameters, load_shape
from meshrl.job.references import find_local_imports
from meshrl.job.toml.reader import find_key_lines, find_line
from meshrl.job.toml.writer import to_toml
from tests.load import scaled
from tests.unit.meshrl.conftest import NO_TENSORS
from tests.unit.meshrl.job.conftest import JobVariant

EXAMPLES = Path(__file__).parents[4] / "examples"
PACED, MANY = 'rollout.emulate="18/32/6000"', "mesh.workers=9"
CORRECTED = ("rollout.top_p=0.9", "algorithm.correction=tis")
REFERENCE = ("models.reference.path=initial", "algorithm.kl_coefficient=0.1")


def test_valid_file_yields_defaults_and_absolute_paths(job: Path) -> None:
    config, base = load_config(job, [])
    assert base == job.parent
    assert config.algorithm.group_size == 4
    assert config.budget.steps == JobConfig().budget.steps
    assert config.dataset.train == str(job.parent / "train.jsonl")
    assert config.models.models_by_role == {} and not config.is_supervised


@pytest.mark.parametrize(
    ("job_", "settings", "values"),
    [
        ("tiny", ["budget.steps=12"], {"budget.steps": 12}),
        ("tiny", ["algorithm.clip_high=0.3"], {"algorithm.clip_high": 0.3}),
        ("tiny", ["name=plain-words"], {"name": "plain-words"}),
        ("tiny", ["name=2024"], {"name": "2024"}),
        ("tiny", ['rollout.stop=["]"]'], {"rollout.stop": ["]"]}),
        ("tiny", ["evaluation.before=false"], {"evaluation.before": False}),
        ("tiny", ["rollout.tensor_parallel=[64]", PACED, "mesh.workers=99"], {}),
        ("tiny", ["lora.rank=8", 'lora.targets=["qkv", "o_proj"]'], {"lora.scale": 4.0}),
        ("tiny", ["mesh.metrics=off"], {"mesh.metrics": "off"}),
        ("tiny", ['reward={use = "regex", options = {pattern = "[0-9]"}}'], {}),
        ("mixture", ["training.expert_parallel=2"], {"training.expert_parallel": 2}),
        ("mixture", ["training.zebra.auto=true", 'training.emulate="declared/300"'], {}),
        ("mixture", ["training.zebra.attention=2", 'training.emulate="declared/300"'], {}),
        ("calculator", CORRECTED, {"algorithm.correction": "tis"}),
        ("calculator", ["rollout.min_tokens=2", "budget.steps=0"], {"rollout.min_tokens": 2}),
        ("calculator", ["optimizer.schedule=cosine"], {"optimizer.schedule": "cosine"}),
        ("calculator", [*CORRECTED, *REFERENCE], {"algorithm.kl_in": "loss"}),
        ("calculator", ["algorithm.name=dapo"], {"algorithm.name": "dapo"}),
        ("calculator", ["algorithm.name=ppo", "algorithm.updates=2"], {"algorithm.updates": 2}),
        ("calculator", ["algorithm.name=gspo", "algorithm.correction=mis"], {}),
    ],
)
def test_settings_are_applied(
    job_: str, settings: list[str], values: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    given: JobVariant = request.getfixturevalue(job_)
    config = given.load(*settings)
    assert {key: get_value(config, key) for key in values} == values


def test_override_without_a_value_shows_the_syntax() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        apply_override({}, "seed")


def test_nearest_key_of_a_key_is_itself() -> None:
    assert all(JOB_SCHEMA.find_nearest_key(key) == key for key in JOB_SCHEMA.types_by_key)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            'a = """\n[not.a.table]\nb = 1\n"""\nc = [\n  1, # ]\n  2,\n]\n["d e".f]\ng.h = 1\n',
            {"a": 1, "c": 5, "d e.f": 9, "d e.f.g.h": 10},
        ),
        (
            "[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n[[a.e]]\n[[a.e]]\nf = 4\n[g]\n",
            {"a": 1, "a[0]": 1, "a[0].b": 2, "a[1]": 3, "a[1].b": 4, "a[1].c": 5, "a[1].c.d": 6}
            | {"a[1].e": 7, "a[1].e[0]": 7, "a[1].e[1]": 8, "a[1].e[1].f": 9, "g": 10},
        ),
    ],
)
def test_key_lines_are_found_in_any_toml_syntax(text: str, lines: dict[str, int]) -> None:
    assert find_key_lines(text) == lines
    assert find_line({"c": 5}, "c.x.y") == 5
    assert find_line(lines, "nowhere") == 0


def test_buckets_and_emulated_speed_are_read_as_written(job: Path) -> None:
    tables = "rollout.buckets=[{max_tokens=60, batch=32}, {max_tokens=320, batch=8, engines=0.5}]"
    config, _ = load_config(job, [tables, "rollout.emulate=18/32/6000"])
    assert [(b.max_tokens, b.batch, b.engines) for b in config.rollout.buckets] == [
        (60, 32, 1.0),
        (320, 8, 0.5),
    ]
    assert JobConfig.from_document(config.to_document()) == config


def test_tensor_parallel_sizes_become_pool_requirements(tiny: JobVariant) -> None:
    need = derive_requirements(
        tiny.load("rollout.tensor_parallel=[4, 2]", PACED, MANY).to_document()
    )
    assert (need.tensor_parallel, need.worker_floor, need.can_time_slice) == ((2, 4), 3, False)
    assert derive_requirements(
        tiny.load("rollout.tensor_parallel=[1, 2]", PACED, MANY).to_document()
    ).can_time_slice
    assert derive_requirements(tiny.load().to_document()).tensor_parallel == (1,)


@pytest.mark.parametrize("example", ["calculator", "chat", "code"])
def test_dry_run_output_is_the_same_job(tmp_path: Path, example: str) -> None:
    base = shutil.copytree(EXAMPLES, tmp_path / "examples")
    stops = 'rollout.stop=["😀", "\\u007f", "\\\\"]'
    job = read_job_file(base / f"{example}.toml", [stops])
    printed = base / "printed.toml"
    for document in (job.config.to_document(), select_differences(job)):
        printed.write_text(to_toml(document), encoding="utf-8")
        assert load_config(printed, []) == (job.config, base)
    assert "planner" not in document and document["rollout"]["stop"]


def test_encodings_are_detected_or_reported_with_their_line(tiny: JobVariant) -> None:
    content = tiny.path.read_bytes()
    tiny.path.write_bytes(b"\xef\xbb\xbf" + content)
    assert tiny.load().name == "tiny"
    source = "# coding: latin-1\n# café\ndef score(row, turns): ...\n"
    (tiny.path.parent / "rewards.py").write_bytes(source.encode("latin-1"))
    tiny.load()
    tiny.path.write_bytes(b"# caf\n# caf\xe9\n" + content)
    assert f"{tiny.path}, line 2: not UTF-8" in tiny.get_error()


def test_defaults_satisfy_their_own_declarations() -> None:
    def fail(key: str, message: str, fix: str) -> ConfigError:
        return ConfigError(message)

    assert JOB_SCHEMA.validate(JobConfig().to_document(), fail) == JobConfig()


def test_job_readers_do_not_import_pydantic() -> None:
    code = "import sys, meshrl.common.job.bundle.job_data; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=scaled(60))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "abacus"}, "unknown model architecture 'abacus'"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not implemented"),
        ({"vocab_size": "many"}, "cannot be read: ValueError"),
    ],
)
@pytest.mark.parametrize("key", ["model.config", "model.path", "models.teacher.path"])
def test_unsupported_model_is_rejected_before_the_start(
    frozen: JobVariant, shape: str, key: str, change: dict[str, Any], why: str
) -> None:
    described = json.loads(shape) | change
    (frozen.path.parent / "teacher/config.json").write_text(json.dumps(described))
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in described.items())
    value = f"{{ {table} }}" if key == "model.config" else "teacher"
    error = frozen.get_error(f"{key}={value}")
    assert error.startswith(f"--set {key}=") and f": {key}: " in error and why in error


TEXT = '[model]\npath = "here"\n\n[budget]\nsteps = 48\n\n[optimizer]\nadamw_lr = 0.001\n'
DOCUMENT = JobConfig().to_document()


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(TEXT)
    return path


def test_unchanged_or_deleted_file_has_no_edits(job_file: Path) -> None:
    kept = record_job_file(job_file)
    assert describe_edits(kept, DOCUMENT, "runs/job") == []
    job_file.unlink()
    assert describe_edits(kept, DOCUMENT, "runs/job") == []


def test_changed_keys_are_reported_with_how_to_apply_them(job_file: Path) -> None:
    kept = record_job_file(job_file)
    job_file.write_text(TEXT.replace("48", "96").replace("here", "there") + "clip_norm = 0.5\n")
    told = "\n".join(describe_edits(kept, DOCUMENT, "runs/job"))
    assert "budget.steps: 48 in the run, 96 in the file" in told
    assert "optimizer.clip_norm: 1.0 in the run, 0.5 in the file" in told
    assert "model.path" in told and "cannot change: the trained weights" in told
    assert told.endswith(
        "meshrl resume runs/job --set budget.steps=96 --set optimizer.clip_norm=0.5"
    )


def test_edit_that_matches_the_run_is_not_reported(job_file: Path) -> None:
    kept = record_job_file(job_file)
    job_file.write_text("# a comment\n" + TEXT)
    assert describe_edits(kept, DOCUMENT, "runs/job") == []
    job_file.write_text(TEXT.replace("48", "96"))
    extended = DOCUMENT | {"budget": {"steps": 96}}
    assert describe_edits(kept, extended, "runs/job") == []


def test_invalid_edited_file_is_reported_without_an_error(job_file: Path) -> None:
    kept = record_job_file(job_file)
    job_file.write_text("[budget\n")
    assert "no longer valid TOML" in describe_edits(kept, DOCUMENT, "runs/job")[0]
    job_file.write_text(TEXT + "\n[unheard]\nof = 1\n")
    assert "unheard.of" in describe_edits(kept, DOCUMENT, "runs/job")[1]


def test_bundle_contains_code_rows_and_tokenizer(job: Path, tmp_path: Path) -> None:
    config, base = load_config(job, [])
    directory, document = pack_bundle(config, base, tmp_path / "run")
    held = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    assert held == [
        "data/held_out.jsonl",
        "data/train.jsonl",
        "modules/rewards.py",
        "modules/tally.py",
        "tokenizer/tokenizer.json",
    ]
    assert (directory / "data/train.jsonl").read_text().count("\n") == 2
    assert document["dataset"]["train"] == "data/train.jsonl"
    files = document["bundle"].pop("files")
    shape = document["bundle"].pop("shape")
    assert ModelShape(**shape).parameters == count_parameters(config) > 0
    assert ModelConfig.from_hf(document["bundle"].pop("models")["trained"]) == load_shape(config)
    about = {
        "dir": str(directory),
        "digest": directory.name,
        "parameters": count_parameters(config),
    }
    assert document["bundle"] == about
    assert list(files) == held and files == list_files(directory)
    assert compute_digest(list_files(directory)) == directory.name


def test_bundle_digest_depends_on_content_alone(job: Path, tmp_path: Path) -> None:
    config, base = load_config(job, [])
    first, _ = pack_bundle(config, base, tmp_path / "run")
    again, _ = pack_bundle(config, base, tmp_path / "run")
    assert first == again
    (base / "tally.py").write_text("COUNT = 3\n")
    changed, _ = pack_bundle(config, base, tmp_path / "run")
    assert changed != first
    assert sorted(p.name for p in (tmp_path / "run/bundle").iterdir()) == sorted(
        [first.name, changed.name]
    )


def test_bundled_model_includes_its_tokenizer(job: Path, tmp_path: Path, shape: str) -> None:
    model = tmp_path / "hub"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    (model / "config.json").write_text(shape)
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    config, base = load_config(job, [f"model.path={model}", "model.tokenizer=''"])
    directory, document = pack_bundle(config, base, tmp_path / "run")
    assert sorted(p.name for p in (directory / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (directory / "tokenizer/tokenizer.json").read_text() == "tokenizer.json"
    assert document["model"]["tokenizer"] == "tokenizer/tokenizer.json"
    assert document["model"]["path"] == "model"


def test_relative_imports_in_a_package_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "game"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "world.py").write_text("from . import dice\nfrom .board import Board\nimport json\n")
    (package / "dice.py").write_text("import outside\n")
    (package / "board.py").write_text("class Board: ...\n")
    (tmp_path / "outside.py").write_text("")
    found = [
        p.relative_to(tmp_path).as_posix() for p in find_local_imports(tmp_path, ["game.world"])
    ]
    assert found == [
        "game/__init__.py",
        "game/board.py",
        "game/dice.py",
        "game/world.py",
        "outside.py",
    ]
