"""python -m loadtests.monitoring [--only ALERT,...]: a mesh of two hosts on this machine, scraped
by a real Prometheus with our configuration, twenty times as fast. Each alert is made to fire and
to clear. Takes Debian's `prometheus`.

One flat JSON line: `fired` (alerts), `ALERT_fired_s`, `ALERT_cleared_s`, `not_fired`,
`not_cleared`, `not_tried`, `errors` (scenes after which the mesh was not well again within five
minutes), `unasked` (what fires while all is well), `missing` (series that alerts and dashboards
name and the mesh does not have), `empty` (panels that never had a sample), `wall_s`. Exits with 1
unless every alert that was tried has fired and cleared, nothing is unasked or missing, and there
were no errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtests.measuring.entry import flat, options, report, tell
from loadtests.monitoring.files import alerts, dashboards, expressions, metrics
from loadtests.monitoring.mesh import WatchedMesh, free_ports
from loadtests.monitoring.scenes import SCENES, Scene
from loadtests.monitoring.watching import Watching, configured, watching

CALM_S = 15.0  # that a mesh is watched while all is well
CALM_BY_S = 300.0  # for a first step, and for a mesh to be well again
FIRE_S = 300.0  # the longest look back is three minutes
CLEAR_S = 5.0  # that an alert does not fire until it counts as cleared
GPUS = "meshrl_gpu_utilization"  # of hosts that have one


class Trial:
    """What came of the scenes so far."""

    def __init__(self, mesh: WatchedMesh, seen: Watching) -> None:
        self.mesh, self.seen = mesh, seen
        self.fired: dict[str, dict[str, float]] = {}
        self.not_cleared: list[str] = []
        self.not_tried: list[str] = []
        self.errors: list[str] = []

    async def calm(self) -> set[str]:
        """Waits until `calc` trains and nothing fires; what fires in the seconds after that."""
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
        """Waits until its alerts fire, and after it until they do not."""
        if scene.mounted and not self.mesh.mounted:
            self.not_tried += scene.alerts
            return
        _say(f"{', '.join(scene.alerts)}: {scene.what}")
        left = set(scene.alerts)
        began = time.monotonic()
        async with scene.play(self.mesh):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRE_S):
                    while left:
                        for name in left & await self.seen.firing():
                            left.discard(name)
                            self.fired[name] = {"fired_s": round(time.monotonic() - began, 1)}
                            _say(f"  {name} fires")
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

    async def lacking(self) -> dict[str, list[str]]:
        """Series and panels for which the mesh has nothing."""
        asked = {e: title for title, d in dashboards().items() for e in expressions(d)}
        named = set().union(
            *(metrics(e) for e in (*asked, *(r["expr"] for r in alerts().values())))
        )
        ever = "last_over_time(({})[1h:5s])"
        empty = [e for e in asked if not await self.seen.value(ever.format(e))]
        return {
            "missing": sorted(named - await self.seen.names() - {GPUS}),
            "empty": [e for e in empty if GPUS not in e],
        }


async def trial(folder: Path, only: set[str]) -> dict[str, Any]:
    """All scenes, or those of some alerts."""
    began = time.monotonic()
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
            lacking = await found.lacking()
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
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """The exit status."""
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
            _say(f"files are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    report(told)
    wrong = ("not_fired", "not_cleared", "errors", "unasked", "missing")
    return int(any(told[key] for key in wrong))


def _say(text: str) -> None:
    tell(text)


if __name__ == "__main__":
    sys.exit(main())
