"""A Prometheus with the configuration and the alerts of compose/monitoring, but in a hurry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from loadtests.monitoring.files import PROMETHEUS, read

FASTER = 20  # times: ten minutes are half of one
LOOKS_FASTER = 5  # how far back a rule looks: processes take as long to start as they ever do
FOR_S = 5.0  # that a condition must hold, at most
SCRAPE = "2s"  # also the time that a page may take
UP_S = 60.0
UNITS = {"s": 1, "m": 60, "h": 3600}
SPAN = re.compile(r"(\[|offset )(\d+)([smh])")


class Watching:
    """A Prometheus that runs."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        found = await self._asked("alerts")
        return {a["labels"]["alertname"] for a in found["alerts"] if a["state"] == "firing"}

    async def names(self) -> set[str]:
        """Names of all series that it has seen."""
        return set(await self._asked("label/__name__/values"))

    async def value(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now, each with `metric` (its labels) and `value`."""
        found = await self._asked("query", query=expression)
        return list(found["result"])

    async def up(self) -> dict[str, bool]:
        """Whether each host of the mesh answers, by its role."""
        found = await self._asked("targets")
        return {
            t["labels"]["role"]: t["health"] == "up"
            for t in found["activeTargets"]
            if "role" in t["labels"]
        }

    async def _asked(self, what: str, **query: str) -> Any:
        url = f"{self._address}/api/v1/{what}?{urllib.parse.urlencode(query)}"

        def answer() -> Any:
            with urllib.request.urlopen(url, timeout=UP_S) as page:
                return json.load(page)["data"]

        return await asyncio.to_thread(answer)


def configured(folder: Path, head: str, host: str) -> Path:
    """The configuration, with these two hosts in place of what DNS finds, and its alerts sooner."""
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
    """Prometheus itself, until the end of the block."""
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
