"""What commands print of untrusted text, on a terminal and elsewhere."""

from __future__ import annotations

import json
import re
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from meshrl import __main__ as program
from meshrl.cli import app
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.host.terminal import guarded_output
from meshrl.directory.places import MeshPlace
from meshrl.view.terminal import Console
from tests.unit.common.base.test_texts import ATTACKS, is_plain
from tests.unit.meshrl.view.test_samples import sample

ATTACK = "".join(ATTACKS)
# What rich itself writes: styles, cursor movements and erasures, without links and titles.
OWN = re.compile(r"\x1b\[\??[\d;]*[A-Kmhl]|\r")
MARKUP = "[bold]b[/] [/nothing] [link=http://x]l[/link] :smile:"


def own_alone(printed: str) -> bool:
    """True if a terminal obeys nothing in a text but what rich writes for styles and screens."""
    return "\x1b[2J" not in printed and is_plain(OWN.sub("", printed))


def test_a_console_writes_its_own_escapes_and_no_others() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=500)
    table = Table("a", title=ATTACK)
    table.add_row(Text(ATTACK, style="bold"))
    table.add_row(MARKUP)
    with Live(console=console, auto_refresh=False) as live:
        for part in (table, Panel(ATTACK, title=Text(ATTACK)), ATTACK, MARKUP):
            live.update(part, refresh=True)
            console.print(part)
    printed = out.getvalue()
    assert own_alone(printed) and "\x1b[1m" in printed and MARKUP in printed
    assert "\\u001b[2J" in printed and "\\u202e" in printed


def test_what_is_printed_above_a_live_screen_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = Console(force_terminal=True, width=500)
    with Live("screen", console=console, auto_refresh=False), guarded_output():
        print(f"said: {ATTACK}")
    assert own_alone(out.getvalue()) and "\\u001b]8;;http" in out.getvalue()


def test_commands_show_control_characters_of_samples_and_logs(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"job": "j", "document": {}}))
    turns = [{"role": "model", "text": ATTACK, "stop": "", "truncated": False}]
    kept = sample(1, None, turns=turns, prompt=ATTACK, error=ATTACK, failure=ATTACK)
    (tmp_path / "samples.jsonl").write_text(json.dumps(kept) + "\n")
    place = MeshPlace(tmp_path)
    place.logs.mkdir(parents=True)
    settings = MeshSettings(redis_url="unix:///nowhere", run_root=str(tmp_path))
    settings.to_file(place.settings)
    place.log("worker").write_bytes(ATTACK.encode(errors="replace") + b"\n\x1b[31mend\n")
    for words in (["samples"], ["samples", "--json"], ["logs"], ["logs", "worker"]):
        ran = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]])
        assert ran.exit_code == 0 and is_plain(ran.output), ran.output
        assert "\\u001b" in ran.output


def test_errors_show_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshrl", "status", f"no {ATTACKS[0]} run"])
    with pytest.raises(SystemExit):
        program.main()
    printed = capsys.readouterr().err
    assert is_plain(printed) and printed.startswith("error: ") and "\\u001b[2J" in printed
