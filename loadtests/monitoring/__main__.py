"""Test of the alerts: a mesh of two hosts, scraped by a real Prometheus with our configuration.

Usage:

    python -m loadtests.monitoring [--only ALERT,...]

Both hosts are on this machine, and time in the configuration is twenty times as fast. Each alert is
made to fire and to clear. Takes Debian's `prometheus`.

One flat JSON line: `fired` (alerts), `ALERT_fired_s`, `ALERT_cleared_s`, `not_fired`,
`not_cleared`, `not_tried`, `errors` (scenes after which the mesh did not recover within five
minutes), `unasked` (alerts that fire without a fault), `missing` (series that alerts and dashboards
name and the mesh does not have), `empty` (panels that never had a sample), `wall_s`. Exits with 1
unless every alert that was tried has fired and cleared, nothing is unasked or missing, and there
were no errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from loadtests.measuring.entry import flat, options, print_progress, report
from loadtests.monitoring.files import PROMETHEUS, alerts, dashboards, expressions, metrics, read
from loadtests.monitoring.mesh import SCENES, Scene, WatchedMesh, free_ports

CALM_S = 15.0  # that a mesh is watched while all is well
CALM_BY_S = 300.0  # for a first step, and for a mesh to be well again
FIRE_S = 300.0  # the longest range of a rule is three minutes
CLEAR_S = 5.0  # that an alert does not fire until it counts as cleared
# Series of meshes with GPUs, or with jobs in time slices.
OPTIONAL = {
    *("meshrl_gpu_utilization", "meshrl_job_slice_seconds", "meshrl_job_switch_seconds"),
    "meshrl_job_hidden_load_share",
}
FASTER = 20  # times: ten minutes are half of one
LOOKS_FASTER = 5  # how far back a rule looks: processes take as long to start as they ever do
FOR_S = 5.0  # that a condition must hold, at most
SCRAPE = "2s"  # also the time that a page may take
UP_S = 60.0
UNITS = {"s": 1, "m": 60, "h": 3600}
SPAN = re.compile(r"(\[|offset )(\d+)([smh])")


class Watching:
    def __init__(self, address: str) -> None:
        self._address = address

    async def firing(self) -> set[str]:
        found = await self._query("alerts")
        return {a["labels"]["alertname"] for a in found["alerts"] if a["state"] == "firing"}

    async def names(self) -> set[str]:
        return set(await self._query("label/__name__/values"))

    async def value(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now, each with `metric` (its labels) and `value`."""
        found = await self._query("query", query=expression)
        return list(found["result"])

    async def up(self) -> dict[str, bool]:
        """Return the reachability of each host of the mesh, by its role."""
        found = await self._query("targets")
        return {
            t["labels"]["role"]: t["health"] == "up"
            for t in found["activeTargets"]
            if "role" in t["labels"]
        }

    async def _query(self, what: str, **query: str) -> Any:
        url = f"{self._address}/api/v1/{what}?{urllib.parse.urlencode(query)}"

        def answer() -> Any:
            with urllib.request.urlopen(url, timeout=UP_S) as page:
                return json.load(page)["data"]

        return await asyncio.to_thread(answer)


def configured(folder: Path, head: str, host: str) -> Path:
    """Write the configuration, with these two hosts in place of DNS discovery and faster alerts."""
    told = read(PROMETHEUS / "prometheus.yaml")
    told["global"] = dict.fromkeys(
        ("scrape_interval", "scrape_timeout", "evaluation_interval"), SCRAPE
    )
    mesh = told["scrape_configs"][0]
    told["scrape_configs"] = [mesh]
    (mesh["static_configs"][0]["targets"],) = ([head],)
    del mesh["dns_sd_configs"]
    mesh["static_configs"].append({"targets": [host], "labels": {"__meta_dns_name": "workers"}})
    rules = read(PROMETHEUS / "alerts.yaml")
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = SPAN.sub(
            lambda m: f"{m[1]}{_ms(m[2], m[3]) // LOOKS_FASTER}ms", rule["expr"]
        )
        rule["expr"] = rule["expr"].replace("> 600", f"> {600 // FASTER}")
        if held := re.fullmatch(r"(\d+)([smh])", rule.get("for", "")):
            rule["for"] = f"{min(_ms(*held.groups()) // FASTER, int(1000 * FOR_S))}ms"
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(told))
    return path


def _ms(number: str, unit: str) -> int:
    return int(number) * UNITS[unit] * 1000


@contextlib.asynccontextmanager
async def watching(config: Path, port: int) -> AsyncIterator[Watching]:
    """Run Prometheus until the end of the block."""
    words = [f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'tsdb'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (config.parent / "prometheus.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            "prometheus", *words, stdout=log, stderr=log, env=os.environ | {"GOMAXPROCS": "1"}
        )
    try:
        found = Watching(f"http://127.0.0.1:{port}")
        async with asyncio.timeout(UP_S):
            while True:
                with contextlib.suppress(OSError):
                    await found.firing()
                    break
                await asyncio.sleep(0.2)
        yield found
    finally:
        server.terminate()
        await server.wait()


class Trial:
    def __init__(self, mesh: WatchedMesh, seen: Watching) -> None:
        self.mesh, self.seen = mesh, seen
        self.fired: dict[str, dict[str, float]] = {}
        self.not_cleared: list[str] = []
        self.not_tried: list[str] = []
        self.errors: list[str] = []

    async def calm(self) -> set[str]:
        """Wait until `calc` trains and no alert fires; return the alerts of the seconds after
        that.
        """
        async with asyncio.timeout(CALM_BY_S):
            while await self.seen.firing() or not await self.seen.value(
                'meshrl_job_step_age_seconds{job="calc"} < 10 and on (job) meshrl_job_steps > 0'
            ):
                await asyncio.sleep(1.0)
        found: set[str] = set()
        until = time.monotonic() + CALM_S
        while time.monotonic() < until:
            found |= await self.seen.firing()
            await asyncio.sleep(1.0)
        return found

    async def play(self, scene: Scene) -> None:
        """Wait until the alerts fire, and then until they are silent."""
        if scene.mounted and not self.mesh.mounted:
            self.not_tried += scene.alerts
            return
        print_progress(f"{', '.join(scene.alerts)}: {scene.what}")
        left = set(scene.alerts)
        started_s = time.monotonic()
        async with scene.play(self.mesh):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRE_S):
                    while left:
                        for name in left & await self.seen.firing():
                            left.discard(name)
                            self.fired[name] = {"fired_s": round(time.monotonic() - started_s, 1)}
                            print_progress(f"  {name} fires")
                        await asyncio.sleep(0.5)
        ended = time.monotonic()
        still = set(scene.alerts) - left
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRE_S):
                gone: dict[str, float] = {}  # since when; one scrape that fails hides an alert
                while still:
                    firing, now = await self.seen.firing(), time.monotonic()
                    gone = {name: gone.get(name, now) for name in still - firing}
                    for name in [name for name, since in gone.items() if now - since > CLEAR_S]:
                        still.discard(name)
                        self.fired[name]["cleared_s"] = round(gone[name] - ended, 1)
                    await asyncio.sleep(0.5)
        self.not_cleared += sorted(still)

    async def find_missing(self) -> dict[str, list[str]]:
        """List the series and panels without data in the mesh."""
        asked = {e: title for title, d in dashboards().items() for e in expressions(d)}
        named = set().union(
            *(metrics(e) for e in (*asked, *(r["expr"] for r in alerts().values())))
        )
        ever = "last_over_time(({})[1h:5s])"
        empty = [e for e in asked if not await self.seen.value(ever.format(e))]
        return {
            "missing": sorted(named - await self.seen.names() - OPTIONAL),
            "empty": [e for e in empty if not metrics(e) & OPTIONAL],
        }


async def trial(folder: Path, only: set[str]) -> dict[str, Any]:
    started_s = time.monotonic()
    mesh = WatchedMesh(folder)
    chosen = [s for s in SCENES if not only or only & set(s.alerts)]
    try:
        await mesh.start()
        await mesh.submit("calc")
        async with watching(configured(folder, *mesh.health), free_ports(1)[0]) as seen:
            found = Trial(mesh, seen)
            unasked = await found.calm()
            for scene in chosen:
                try:
                    await found.play(scene)
                    again = await found.calm()
                    found.not_cleared += sorted(again & set(scene.alerts))
                except (RuntimeError, TimeoutError) as error:
                    found.errors.append(f"{scene.what}: {error!r}")
            lacking = await found.find_missing()
    finally:
        await mesh.stop()
    tried = {name for scene in chosen for name in scene.alerts} - set(found.not_tried)
    return {
        "fired": sorted(found.fired),
        **flat(found.fired),
        "not_fired": sorted(tried - set(found.fired)),
        "not_cleared": found.not_cleared,
        "errors": found.errors,
        "not_tried": sorted(set(alerts()) - tried),
        "unasked": sorted(unasked),
        **lacking,
        "wall_s": round(time.monotonic() - started_s, 1),
    }


def main() -> int:
    parser = options(
        __doc__,
        only=("", "alerts, with commas"),
        keep=(False, "leave the files, and say where"),
    )
    asked = parser.parse_args()
    if shutil.which("prometheus") is None:
        parser.error("there is no `prometheus` on the path: apt-get install prometheus")
    folder = Path(tempfile.mkdtemp(prefix="mon"))
    try:
        told = asyncio.run(trial(folder, set(filter(None, asked.only.split(",")))))
    finally:
        if asked.keep:
            print_progress(f"files are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report(told)
    wrong = ("not_fired", "not_cleared", "errors", "unasked", "missing")
    return int(any(told[key] for key in wrong))


if __name__ == "__main__":
    sys.exit(main())
