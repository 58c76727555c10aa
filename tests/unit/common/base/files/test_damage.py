"""What is set aside keeps its bytes and its place, and never another's."""

from pathlib import Path

from meshrl.common.base.files import damage


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


def test_the_table_of_the_documentation_is_the_policy() -> None:
    page = (Path(__file__).parents[5] / "docs/operations.md").read_text(encoding="utf-8")
    section = page.split("## Damaged files")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    told = {kind: then for kind, _, then in rows[2:]}
    assert told == damage.FATES


def test_an_event_is_a_sentence_that_names_the_file_and_what_follows() -> None:
    path = Path("/run/events.jsonl")
    told = damage.fields("events", path, "it is gone", "made again from Redis", job="one")
    assert damage.sentence(told) == f"{path} is damaged: it is gone. Made again from Redis."
    aside = damage.fields("usage", path, "it is empty", "counted anew", aside=Path("/run/q"))
    assert damage.sentence(aside).endswith("Counted anew. It lies in /run/q.")
