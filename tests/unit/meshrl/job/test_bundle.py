"""A bundle holds what a job needs, under a name that its content decides."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.bundle.bundle_files import digest_of, listed
from meshrl.job.bundle import pack
from meshrl.job.jobfile import load
from meshrl.job.model_files import size
from meshrl.job.references import neighbours
from tests.unit.meshrl.conftest import NO_TENSORS


def test_a_bundle_holds_code_rows_and_tokenizer(job: Path, tmp_path: Path) -> None:
    config, base = load(job, [])
    directory, document = pack(config, base, tmp_path / "run")
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
    assert ModelShape(**shape).parameters == size(config) > 0
    about = {"dir": str(directory), "digest": directory.name, "parameters": size(config)}
    assert document["bundle"] == about
    assert list(files) == held and files == listed(directory)
    assert digest_of(listed(directory)) == directory.name


def test_packing_twice_gives_one_bundle_and_a_change_gives_another(
    job: Path, tmp_path: Path
) -> None:
    config, base = load(job, [])
    first, _ = pack(config, base, tmp_path / "run")
    again, _ = pack(config, base, tmp_path / "run")
    assert first == again
    (base / "tally.py").write_text("COUNT = 3\n")
    changed, _ = pack(config, base, tmp_path / "run")
    assert changed != first
    assert sorted(p.name for p in (tmp_path / "run/bundle").iterdir()) == sorted(
        [first.name, changed.name]
    )


def test_a_model_directory_travels_with_its_tokenizer(
    job: Path, tmp_path: Path, shape: str
) -> None:
    model = tmp_path / "hub"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / name).write_text(name)
    (model / "config.json").write_text(shape)
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    config, base = load(job, [f"model.path={model}", "model.tokenizer=''"])
    directory, document = pack(config, base, tmp_path / "run")
    assert sorted(p.name for p in (directory / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (directory / "tokenizer/tokenizer.json").read_text() == "tokenizer.json"
    assert document["model"]["tokenizer"] == "tokenizer/tokenizer.json"
    assert document["model"]["path"] == "model"


def test_relative_imports_inside_a_package_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "game"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "world.py").write_text("from . import dice\nfrom .board import Board\nimport json\n")
    (package / "dice.py").write_text("import outside\n")
    (package / "board.py").write_text("class Board: ...\n")
    (tmp_path / "outside.py").write_text("")
    found = [p.relative_to(tmp_path).as_posix() for p in neighbours(tmp_path, ["game.world"])]
    assert found == [
        "game/__init__.py",
        "game/board.py",
        "game/dice.py",
        "game/world.py",
        "outside.py",
    ]
