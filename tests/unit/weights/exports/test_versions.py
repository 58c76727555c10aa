"""Queries and commands on a run's versions, from the command line and in process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshrl.cli import app
from meshrl.commands.weights import collect_reports
from meshrl.common.base.errors import (
    ConfigError,
    MeshError,
    NotFound,
    QuotaExceeded,
    Refused,
    StorageFull,
)
from meshrl.common.base.files.sealed_documents import encode_sealed
from meshrl.common.model.files.hf_writer import save_model
from meshrl.common.model.files.initial_parameters import load_model
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.common.records.checkpoints import format_checkpoint_name
from meshrl.directory.versions_process import build_command, parse_answer, run_versions_command
from meshrl.runs.resumption import resume_run
from meshrl.services.weights.atomic_directories import scratch_directory
from meshrl.services.weights.retention.pins import PINS_FOLDER, VersionPin, pin_version
from meshrl.services.weights.versions.__main__ import run_command
from meshrl.services.weights.versions.comparison import compare_versions
from meshrl.services.weights.versions.export_targets import UNFINISHED_MARKER, export_to
from meshrl.services.weights.versions.run_versions import RunVersions, list_versions
from tests.load import scaled
from tests.unit.weights.exports.test_export import CONFIG, SHAPE, Run, model, weights


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run with versions 0 to 3; version 2 differs from version 1 in one element."""
    config = replace(CONFIG, weights=replace(CONFIG.weights, keep=2, quota_gb=1.0))
    new_run = Run(tmp_path, config)
    new_run.commit(0, weights(model(0)), "initial")
    new_run.commit(1, first := weights(model(1)))
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["final_norm"][3] += 0.5
    new_run.commit(2, second)
    new_run.commit(3, weights(model(3)))
    return new_run


def list_manifests(run: Run) -> list[str]:
    return [one.manifest_digest for one in list_versions(run.directory)]


def invoke_weights(run: Run, *words: str) -> str:
    """Run `meshrl weights` and return its output."""
    result = CliRunner().invoke(app, ["weights", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_versions_are_listed_with_retention_reasons(run: Run) -> None:
    manifest = list_manifests(run)[1]
    name = format_checkpoint_name(0, 1, manifest)
    (run.directory / "checkpoints").mkdir()
    record = {"lineage": 0, "step": 1, "weights": manifest, "files": {}}
    (run.directory / "checkpoints" / f"{name}.json").write_bytes(encode_sealed(record))
    run.event("evaluation", best=True, step=0, manifest=list_manifests(run)[0], value=0.5)
    listing = json.loads(invoke_weights(run, "list", str(run.directory), "--json"))
    reasons = [(one["version"], one["why"]) for one in listing["versions"]]
    assert reasons == [(0, ["best"]), (1, ["checkpoint"]), (2, ["weights.keep"]), (3, ["current"])]
    assert listing["quota_bytes"] == 1 << 30
    assert listing["bytes"] == sum(one["alone"] for one in listing["versions"]) > 0
    output = invoke_weights(run, "list", str(run.directory))
    assert re.search(rf"1 +{manifest[:8]} .*checkpoint", output)
    assert "4 versions of j" in output and "of 1 GiB" in output


def test_version_is_pinned_and_unpinned_by_any_of_its_names(run: Run) -> None:
    run_dir, fourth = str(run.directory), list_manifests(run)[3]
    for word in ("3", "0/3", "last", fourth, fourth[:6]):
        run_command(["pin", "--note=--for the paper", "--", run_dir, word])
        [one] = [o for o in RunVersions.read(run.directory).versions if "pinned" in o.why]
        assert (one.manifest, one.note) == (fourth, "--for the paper")
        second_pin = run_command(["pin", run_dir, word])
        assert second_pin["was_pinned"] and second_pin["note"] == "--for the paper"
        unpinned = run_command(["unpin", run_dir, word])
        assert unpinned["was_pinned"] and unpinned["why"] == ["current"]
        assert not run_command(["unpin", run_dir, word])["was_pinned"]
    assert not (run.chunks.directory / PINS_FOLDER / "j").exists()


def test_pin_and_unpin_print_the_version(run: Run) -> None:
    run_dir = str(run.directory)
    assert invoke_weights(run, "pin", run_dir, "0", "--note", "-x") == "version 0 of j is pinned\n"
    assert (
        invoke_weights(run, "unpin", run_dir, "0")
        == "version 0 of j is unpinned; it is to be deleted\n"
    )


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("7", NotFound, "does not have version 7.*Choose one of 0, 1, 2, 3"),
        ("1/3", NotFound, "does not have version 1/3"),
        ("best", NotFound, "evaluation.best"),
        ("newest", ConfigError, "'newest' does not name a version.*LINEAGE/NUMBER, last, best"),
        ("-1", ConfigError, "'-1' does not name a version"),
        ("", ConfigError, "does not name a version"),
        ("abc", ConfigError, "does not name a version"),
        ("3.0", ConfigError, "does not name a version"),
        ("0/", ConfigError, "does not name a version"),
        ("/3", ConfigError, "does not name a version"),
        ("³", ConfigError, "does not name a version"),
        ("abcdef0", NotFound, "does not have version abcdef0"),
        ("../../etc", ConfigError, "does not name a version"),
    ],
)
def test_invalid_version_names_raise_clear_errors(
    run: Run, word: str, error: type[MeshError], message: str
) -> None:
    with pytest.raises(error, match=message):
        RunVersions.read(run.directory).resolve(word)


def test_versions_of_an_abandoned_lineage_are_not_resolved(run: Run) -> None:
    store = RunVersions.read(run.directory)
    assert store.resolve("2").manifest == list_manifests(run)[2]
    run.event("lineage", job="j", version=1, lineage=1, manifest=list_manifests(run)[1])
    remaining = list_manifests(run)
    assert len(remaining) == 2
    store = RunVersions.read(run.directory)
    assert store.resolve("last").version == 1
    with pytest.raises(NotFound, match=r"Choose one of 0, 1$"):
        store.resolve("2")


def test_path_without_a_run_raises_an_error(tmp_path: Path, run: Run) -> None:
    with pytest.raises(NotFound, match=r"has no job\.json"):
        run_command(["list", str(tmp_path)])
    with pytest.raises(NotFound, match=r"has no job\.json"):
        run_command(["list", str(run.directory / "job.json")])
    (run.directory / "job.json").write_text("{")
    with pytest.raises(MeshError, match="not JSON"):
        run_command(["list", str(run.directory)])


def test_run_without_versions_lists_none(tmp_path: Path) -> None:
    empty = Run(tmp_path, CONFIG)
    assert run_command(["list", str(empty.directory)])["versions"] == []
    with pytest.raises(NotFound, match="ended before version 0"):
        run_command(["pin", str(empty.directory), "last"])


def test_version_with_a_missing_chunk_is_incomplete_and_not_pinned(run: Run) -> None:
    one = RunVersions.read(run.directory).resolve("1")
    [chunk] = run.list_chunks(one.manifest)
    run.chunks.chunk_path(chunk).unlink()
    complete = [one.whole for one in RunVersions.read(run.directory).versions]
    assert complete == [True, False, True, True]
    with pytest.raises(NotFound, match="not complete any more"):
        run_command(["pin", str(run.directory), "1"])


def test_pins_of_another_run_with_the_same_job_are_ignored(run: Run) -> None:
    digest = list_manifests(run)[0]
    pin_version(run.chunks, "j", digest, VersionPin("/elsewhere", 0, 0))
    assert RunVersions.read(run.directory).pins == {}


def test_difference_of_two_versions_is_reported_by_tensor(run: Run) -> None:
    report = run_command(["diff", str(run.directory), "1", "2"])
    assert report["changed"] == 1 and report["largest"] == 0.5
    assert report["elements"] == sum(t.numel() for t in weights(model(1)).values())
    first = report["tensors"][0]
    assert (first["name"], first["changed"], first["elements"]) == ("final_norm", 1, 16)
    assert first["mean"] == 0.5 / 16
    output = invoke_weights(run, "diff", str(run.directory), "1", "2", "-n", "1")
    assert "final_norm" in output and "6.250%" in output and "embedding" not in output
    assert f"... and {len(report['tensors']) - 1} more" in output
    assert "from 1 to 2: 1 of" in output
    same = run_command(["diff", str(run.directory), "3", "last"])
    assert same["changed"] == 0 and same["largest"] == 0.0


def test_versions_of_two_runs_are_compared(run: Run, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    other = Run(tmp_path / "b", CONFIG)
    other.commit(0, weights(model(1)), "initial")
    words = ["diff", str(run.directory), "1", "0", "--other", str(other.directory)]
    assert run_command(words)["changed"] == 0


def test_differing_shapes_types_and_names_are_reported() -> None:
    before = {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.ones(2)}
    after = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(3), "d": torch.ones(1)}
    report: dict[str, Any] = compare_versions(before, after)
    notes = {one["name"]: one["note"] for one in report["tensors"]}
    assert notes == {
        "a": "types F32 and BF16",
        "b": "shapes [2] and [3]",
        "c": "only in the first",
        "d": "only in the second",
    }
    assert (report["changed"], report["elements"]) == (0, 4)


def test_changed_zero_signs_and_nan_are_counted() -> None:
    before = {"a": torch.tensor([0.0, float("nan"), 1.0, 2.0])}
    after = {"a": torch.tensor([-0.0, float("nan"), 1.0, float("inf")])}
    report = compare_versions(before, after)["tensors"][0]
    assert report["changed"] == 2 and report["largest"] == float("inf")
    nan = compare_versions({"a": torch.ones(1)}, {"a": torch.tensor([float("nan")])})
    assert nan["changed"] == 1 and nan["largest"] != nan["largest"]


def test_version_is_exported_by_name(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = invoke_weights(run, "export", str(run.directory), "1", "--out", str(out))
    assert f"version 1: {out}" in output
    exported = load_model(out)[1].state_dict()
    assert all(torch.equal(exported[n], t) for n, t in weights(model(1)).items())


def test_interrupted_export_to_a_url_is_resumed(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "there"
    store = RunVersions.read(run.directory)
    third = store.resolve("last")
    assert export_to(store, third, f"file://{target}") > 0
    stat_before = (target / "model.safetensors").stat()
    # as if interrupted just before its end
    (target / "meshrl.json").rename(target / UNFINISHED_MARKER)
    (target / "half.part").write_bytes(b"half")
    export_to(store, third, f"file://{target}")
    assert (target / "model.safetensors").stat() == stat_before, (
        "existing files are not copied again"
    )
    assert not (target / "half.part").exists() and not (target / UNFINISHED_MARKER).exists()
    assert torch.equal(
        load_model(target)[1].state_dict()["embedding"], weights(model(3))["embedding"]
    )
    assert export_to(store, third, f"file://{target}") == 0, "nothing is left to copy"
    export_to(store, store.resolve("0"), f"file://{target}")
    assert json.loads((target / "meshrl.json").read_text())["step"] == 0
    assert not list((run.directory / "exports").iterdir())


def test_failed_export_leaves_the_version_at_the_url(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "there"
    store = RunVersions.read(run.directory)
    export_to(store, store.resolve("0"), f"file://{target}")
    content_before = {path.name: path.read_bytes() for path in target.iterdir()}
    [chunk] = run.list_chunks(store.resolve("3").manifest)
    run.chunks.chunk_path(chunk).unlink()
    with pytest.raises(NotFound, match=chunk):
        export_to(store, store.resolve("3"), f"file://{target}")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == content_before


def test_only_an_export_is_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years")
    with pytest.raises(Refused, match="is not the directory of an export"):
        run_command(["export", "--out", str(tmp_path / "mine"), str(run.directory), "last"])
    with pytest.raises(ConfigError, match="s3x"):
        run_command(["export", "--out", "s3x://bucket", str(run.directory), "last"])


def test_foreign_files_at_a_url_are_not_removed(run: Run, tmp_path: Path) -> None:
    foreign = tmp_path / "theirs"
    (foreign / "thesis").mkdir(parents=True)
    (foreign / "thesis/one.txt").write_text("years")
    with pytest.raises(Refused, match="is not the directory of an export"):
        run_command(["export", f"--out=file://{foreign}", "--", str(run.directory), "last"])
    with pytest.raises(MeshError, match="Not a directory"):
        run_command(
            ["export", f"--out=file://{foreign}/thesis/one.txt", "--", str(run.directory), "1"]
        )
    assert (foreign / "thesis/one.txt").read_text() == "years"
    assert [path.name for path in foreign.iterdir()] == ["thesis"]


def test_interrupted_copy_of_another_version_is_not_resumed(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "there"
    store = RunVersions.read(run.directory)
    export_to(store, store.resolve("0"), f"file://{target}")
    (target / "meshrl.json").unlink()
    (target / UNFINISHED_MARKER).write_text(json.dumps({"manifest": store.resolve("0").manifest}))
    export_to(store, store.resolve("3"), f"file://{target}")  # whose files have the same sizes
    state = load_model(target)[1].state_dict()
    assert all(torch.equal(state[name], one) for name, one in weights(model(3)).items())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("/proc/x", "cannot be read or written.*/proc/x"),
        ("{}/file/x", "[Nn]ot a directory.*Check the path"),
        ("{}/" + "x" * 300, "name too long"),
        ("/", "is the root directory"),
        ("memory://x", "exists only in the memory of the process"),
        ("://x", "a URL of no known scheme"),
        ("file:///proc/x", "the target of the copy cannot be reached.*no folder can be created"),
        ("{}/mine.partial/../mine", "another process writes"),
    ],
)
def test_invalid_export_target_raises_a_clear_error(
    run: Run, tmp_path: Path, out: str, message: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with (
        scratch_directory(tmp_path / "mine.partial"),
        pytest.raises(MeshError, match=f"(?s){message}") as raised,
    ):
        run_command(["export", f"--out={out.format(tmp_path)}", "--", str(run.directory), "last"])
    assert raised.value.fix or ". " in str(raised.value), "the error has a fix"
    assert (tmp_path / "file").read_text() == "mine"


def test_link_to_an_export_stays_a_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for word in ("1", "3"):
        run_command(["export", f"--out={tmp_path / 'out'}", "--", str(run.directory), word])
        metadata = json.loads((tmp_path / "disk/meshrl.json").read_text())
        assert metadata["step"] == int(word) and (tmp_path / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "disk", "out", "run"]


@pytest.mark.deep
@pytest.mark.parametrize("act", ["export", "import"])
def test_full_disk_raises_an_error_and_leaves_no_files(run: Run, tmp_path: Path, act: str) -> None:
    source, out = make_model_directory(tmp_path / "base"), tmp_path / "below" / "out"
    words = {
        "export": ["export", f"--out={out}", "--", str(run.directory), "1"],
        "import": ["import", *IMPORT, f"--out={out}", "--", str(source)],
    }[act]

    limited_shell = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh"]  # in blocks of 512 bytes
    result = subprocess.run(
        [*limited_shell, *build_command(words)],
        env=os.environ
        | {"PYTHONDONTWRITEBYTECODE": "1"},  # the limit would truncate bytecode files
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    with pytest.raises(StorageFull, match="Free disk"):
        parse_answer(result.stdout, result.stderr)
    assert result.returncode == 1 and list(out.parent.iterdir()) == []


def test_invalid_answer_raises_an_error() -> None:
    with pytest.raises(MeshError, match="ModuleNotFoundError"):
        parse_answer("", "Traceback\nModuleNotFoundError: no torch")
    with pytest.raises(QuotaExceeded):
        parse_answer('{"error": {"code": "quota_exceeded", "text": "x"}}', "")


def make_model_directory(directory: Path) -> Path:
    """Write a model directory as its authors publish it."""
    (directory / "made").mkdir(parents=True)
    tokenizer = directory / "made" / "tokenizer.json"
    build_character_tokenizer("0123456789+-= ", str(tokenizer))
    save_model(directory, SHAPE, model(7).state_dict(), tokenizer)
    shutil.rmtree(tokenizer.parent)
    return directory


def test_imported_directory_becomes_a_run_for_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = make_model_directory(tmp_path / "base")
    result = CliRunner().invoke(app, ["weights", "import", str(source)], catch_exceptions=False)
    assert 'model.path = "runs/base/model"' in result.output
    run = tmp_path / "runs/base"
    [one] = RunVersions.read(run).versions
    assert (one.name, one.why, one.dtype, one.whole) == ("0/0", ["current"], "F32", True)
    state = load_model(run / "model")[1].state_dict()
    assert all(torch.equal(state[name], t) for name, t in model(7).state_dict().items())
    with pytest.raises(Refused, match="is an import of"):
        resume_run(run, [])
    with pytest.raises(Refused, match="exists already"):
        run_command(["import", *IMPORT, f"--out={run}", "--", str(source)])
    with pytest.raises(Refused, match="is a run"):
        run_command(["import", *IMPORT, "--out=x", "--", str(run)])


IMPORT = ("--name=m", "--dtype=bfloat16")


def test_import_may_change_the_dtype(tmp_path: Path) -> None:
    source = make_model_directory(tmp_path / "base")
    run_command(["import", "--name=f", "--dtype=float32", f"--out={tmp_path / 'f'}", str(source)])
    answer = run_command(["import", *IMPORT, f"--out={tmp_path / 'b'}", str(source)])
    [one] = RunVersions.read(tmp_path / "b").versions
    assert (one.dtype, one.bytes) == ("BF16", answer["bytes"])
    words = ["diff", str(tmp_path / "f"), "0", "0", f"--other={tmp_path / 'b'}"]
    report = run_command(words)
    assert 0 < report["largest"] < 0.01 and report["tensors"][0]["note"] == "types F32 and BF16"


def test_invalid_model_directory_leaves_no_run(tmp_path: Path) -> None:
    source, out = make_model_directory(tmp_path / "base"), tmp_path / "out"
    invalid = [
        (tmp_path / "nowhere", "there is no directory"),
        (tmp_path, r"has no tokenizer\.json"),
        (source / "config.json", "is not a directory"),
    ]
    shapeless = tmp_path / "shapeless"
    shutil.copytree(source, shapeless)
    (shapeless / "config.json").unlink()
    invalid.append((shapeless, r"has no config\.json"))
    weightless = tmp_path / "weightless"
    shutil.copytree(source, weightless)
    (weightless / "model.safetensors").unlink()
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:-10])
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    (broken / "model.safetensors").write_bytes(content[:-4] + b"\xff\xff\xff\x7f")
    invalid += [(weightless, "safetensors"), (cut, "cut|bytes"), (broken, "not finite")]
    for directory, message in invalid:
        with pytest.raises((NotFound, ConfigError), match=message):
            run_command(["import", *IMPORT, f"--out={out}", "--", str(directory)])
        assert not out.exists() and not list(tmp_path.glob(".out*"))


def test_explain_prints_recorded_transport_choices(run: Run) -> None:
    run_dir = str(run.directory)
    command = ["weights", "--explain", "--run", run_dir]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "no version was transferred" in result.output
    fields: dict[str, Any] = {
        "process": "engine/g1.0",
        "host": "b",
        "way": "pull",
        "why": "first",
        "verdict": "",
    }
    fields |= {"bytes": 3 << 20, "took_s": 1.5, "predicted_s": None, "rates": {"pull": 2 << 20}}
    run.event("weights_way", **fields)
    run.event("weights_way", **fields | {"way": "collective", "why": "it is faster"})
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert re.search(r"engine/g1\.0 +collective +3 MiB +1\.5 s +it is faster", result.output)
    assert "pull: 2 MiB/s" in result.output
    json_result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    assert json.loads(json_result.output)[0]["way"] == "collective"


def test_explain_prints_the_transport_to_an_sglang_server(run: Run) -> None:
    fields: dict[str, Any] = {"way": "ipc", "why": "the engine process shares each rank's GPU"}
    fields["verdict"] = ""
    fields |= {"bytes": 3 << 20, "took_s": 0.5, "predicted_s": 0.6, "rates": {"ipc": 6 << 20}}
    run.event("weights_way", process="engine/g1.0 (SGLang)", host="a", **fields)
    command = ["weights", "--explain", "--run", str(run.directory)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert re.search(r"engine/g1\.0 \(SGLang\) +ipc +3 MiB +0\.5 s +0\.6 s", result.output)
    assert "shares" in result.output and "ipc: 6 MiB/s" in result.output
    stats = {"weights_way": {"way": "pull"}, "server_transport": fields}
    assert collect_reports("engine/g1.0", stats) == {
        "engine/g1.0": {"way": "pull"},
        "engine/g1.0 (SGLang)": fields,
    }
    assert collect_reports("trainer/job", {"version": 3}) == {}


def test_weights_without_a_command_shows_help() -> None:
    assert "Commands" in CliRunner().invoke(app, ["weights"], catch_exceptions=False).output
    result = CliRunner().invoke(app, ["weights", "--explain", "list"])
    assert result.exit_code == 2 and "takes no subcommand" in result.output


def test_versions_can_be_listed_from_any_thread(run: Run) -> None:
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(run_versions_command, "list", run.directory).result()
    assert [one["version"] for one in listing["versions"]] == [0, 1, 2, 3]
