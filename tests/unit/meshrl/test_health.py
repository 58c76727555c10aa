"""Terminal output of commands: health, logs, plans and escaped control characters."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Event, Thread

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from meshrl import __main__ as program
from meshrl.cli import app
from meshrl.commands import logs, planning
from meshrl.commands.logs import RemoteLog, RemoteLogs
from meshrl.common.api.node import LogFile, LogPart
from meshrl.common.base.errors import PeerLost
from meshrl.common.base.host.settings import MeshSettings
from meshrl.common.base.host.terminal import escaped_output
from meshrl.common.mesh.process.child_handle import read_start_time
from meshrl.common.state import leader
from meshrl.common.state.pool.scheduling.snapshot import PoolSnapshot
from meshrl.common.state.pool.store.snapshot_documents import encode_snapshot
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.common.state.redis import embedded_server
from meshrl.common.state.redis.keys import PLANNER_ELECTION
from meshrl.directory.directory_paths import MeshPaths, write_json
from meshrl.health import probe_url
from meshrl.view.terminal import Console
from tests.contract.state.state_bench import running_server
from tests.load import scaled
from tests.unit.common.base.test_texts import ATTACKS, is_plain
from tests.unit.meshrl.runs.conftest import JOB, HeldMesh, held_mesh
from tests.unit.meshrl.view.test_samples import sample

HELD = Event()


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/drips":
            while not HELD.wait(0.1):
                self.wfile.write(b"H")
            return
        self.send_response(503 if self.path == "/readyz" else 200)
        self.end_headers()
        self.wfile.write(b"it is draining\n" if self.path == "/readyz" else b"ok\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_probe_quotes_the_answer_and_ends_in_time() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            assert probe_url(f"{url}/livez") == (True, "ok")
            assert probe_url(f"{url}/readyz") == (False, "503 it is draining")
            started_s = time.monotonic()
            well, said = probe_url(f"{url}/drips")
            assert not well and "does not answer" in said
            assert time.monotonic() - started_s < scaled(30.0), "it drips until it is held"
        finally:
            HELD.set()
            server.shutdown()
    well, said = probe_url(f"{url}/livez")
    assert not well and "does not answer" in said
    for wrong in ("localhost:9400", "https://x/livez", "http://x:0/", "http://x:99999/"):
        well, said = probe_url(wrong)
        assert not well and "is not a URL such as http://HOST:PORT/readyz" in said


def test_health_program_exits_by_the_answer_and_imports_little() -> None:
    code = (
        "import runpy, sys, json\n"
        "sys.argv = ['health', 'http://127.0.0.1:1/livez']\n"
        "try: runpy.run_module('meshrl.health', run_name='__main__')\n"
        "except SystemExit as end: print(json.dumps([end.code, sorted(sys.modules)]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60)
    )
    said, ended = ran.stdout.splitlines()
    assert said.startswith("http://127.0.0.1:1/livez does not answer")
    exit_code, modules = json.loads(ended)
    assert exit_code == 1
    assert not {"torch", "redis", "typer", "structlog", "meshrl.common"} & set(modules)


LOOKS = 3


def test_local_log_is_shown_when_other_hosts_cannot_be_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHRL_REDIS_URL", raising=False)
    place = MeshPaths(tmp_path)
    place.logs.mkdir(parents=True)
    place.log_path("redis").write_text("one\nwhy it went down\n")
    place.joined_hosts.write_text("damaged")
    write_json(place.root_marker, {"pid": os.getpid(), "start_time": read_start_time(os.getpid())})
    with running_server(embedded_server.find_server()) as server:
        wrong = server.url.replace("://", "://:wrong@")
        settings = MeshSettings(redis_url=wrong, run_root=str(tmp_path), secret="5e" * 32)
        settings.to_file(place.settings)
        found = CliRunner().invoke(app, ["logs", "redis", "-n", "1", "--mesh", str(tmp_path)])
    assert (found.exit_code, found.stdout) == (0, "why it went down\n"), found.exception
    assert "(newer logs of redis on other hosts cannot be checked: " in found.stderr


class VanishingAgent(RemoteLogs):
    """Agent that returns part of a long log once and then stops answering."""

    def __init__(self) -> None:
        self.asked = 0

    async def read_part(self, log: RemoteLog, offset: int) -> LogPart:
        self.asked += 1
        if self.asked > LOOKS:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.asked == 1:
            return LogPart("one\n", 4, 1000)
        raise PeerLost("its agent is gone")


async def test_vanished_host_is_polled_again_after_an_interval() -> None:
    gone, since = VanishingAgent(), asyncio.get_running_loop().time()
    log = RemoteLog("second-1", LogFile("note", 1000, 0.0))
    follows = asyncio.create_task(logs._print_from_host(gone, log, 1, follow=True))
    async with asyncio.timeout(scaled(30.0)):
        while gone.asked <= LOOKS:
            await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - since >= (LOOKS - 1) * logs.POLL_S
    follows.cancel()


__all__ = ["held_mesh"]


def test_saved_snapshot_is_explained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    snapshot = PoolSnapshot(
        now_ms=10_000_000, workers=(WorkerRow("w0", "here", "cpu:0", 1, alive=False),)
    )
    file = tmp_path / "look.json"
    file.write_text(json.dumps({"snapshot": encode_snapshot(snapshot), "memory": None}))
    assert planning.print_plan(file, True, True, None) == 0
    assert set(json.loads(capfd.readouterr().out)) == {"decisions", "memory"}
    file.write_text("{")
    assert planning.print_plan(file, True, False, None) == 2


def test_plan_of_a_mesh_uses_the_leaders_snapshot(held_mesh: HeldMesh) -> None:
    words = ["plan", "--mesh", str(held_mesh.root)]
    assert "no planner leads" in str(CliRunner().invoke(app, words).exception)
    held_mesh.ask(lambda state: leader.campaign(state, PLANNER_ELECTION, "planner/0.one", 60_000))
    found = json.loads(CliRunner().invoke(app, words).output)
    assert [job["id"] for job in found["snapshot"]["jobs"]] == [JOB]


ATTACK = "".join(ATTACKS)
# Escapes that rich writes: styles, cursor movements and erasures, without links and titles.
OWN = re.compile(r"\x1b\[\??[\d;]*[A-Kmhl]|\r")
MARKUP = "[bold]b[/] [/nothing] [link=http://x]l[/link] :smile:"


def has_only_rich_escapes(printed: str) -> bool:
    """Return True if a text contains no escapes but those of rich."""
    return "\x1b[2J" not in printed and is_plain(OWN.sub("", printed))


def test_console_escapes_control_characters_of_its_content() -> None:
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
    assert has_only_rich_escapes(printed) and "\x1b[1m" in printed and MARKUP in printed
    assert "\\u001b[2J" in printed and "\\u202e" in printed


def test_text_above_a_live_screen_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = Console(force_terminal=True, width=500)
    with Live("screen", console=console, auto_refresh=False), escaped_output():
        print(f"said: {ATTACK}")
    assert has_only_rich_escapes(out.getvalue()) and "\\u001b]8;;http" in out.getvalue()


def test_commands_escape_control_characters_of_samples_and_logs(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"job": "j", "document": {}}))
    turns = [{"role": "model", "text": ATTACK, "stop": "", "truncated": False}]
    kept = sample(1, None, turns=turns, prompt=ATTACK, error=ATTACK, failure=ATTACK)
    (tmp_path / "samples.jsonl").write_text(json.dumps(kept) + "\n")
    place = MeshPaths(tmp_path)
    place.logs.mkdir(parents=True)
    settings = MeshSettings(redis_url="unix:///nowhere", run_root=str(tmp_path))
    settings.to_file(place.settings)
    place.log_path("worker").write_bytes(ATTACK.encode(errors="replace") + b"\n\x1b[31mend\n")
    for words in (["samples"], ["samples", "--json"], ["logs"], ["logs", "worker"]):
        ran = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]])
        assert ran.exit_code == 0 and is_plain(ran.output), ran.output
        assert "\\u001b" in ran.output


def test_errors_escape_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["meshrl", "status", f"no {ATTACKS[0]} run"])
    with pytest.raises(SystemExit):
        program.main()
    output = capsys.readouterr().err
    assert is_plain(output) and output.startswith("error: ") and "\\u001b[2J" in output
