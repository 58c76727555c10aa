"""What is set aside keeps its bytes and its place, and never another's."""

from pathlib import Path

from common.records import damage


def test_set_aside_keeps_what_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step.json"
    path.parent.mkdir()
    found = []
    for content in ("first", "second"):
        path.write_text(content)
        found.append(damage.set_aside(path, tmp_path))
        assert not path.exists()
    assert [place.read_text() for place in found] == ["first", "second"]
    assert found[0] == tmp_path / "quarantine" / "checkpoints" / "step.json"


def test_what_lies_elsewhere_is_set_aside_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere" / "file"
    path.parent.mkdir()
    path.write_text("content")
    root = tmp_path / "run"
    root.mkdir()
    assert damage.set_aside(path, root) == root / "quarantine" / "file"
