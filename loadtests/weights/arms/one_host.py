"""Arm with a version on one host, beside copying as many bytes, a gloo broadcast and an HTTP
download.

Each round receives a version that no process of the host has received. Its chunks were hashed as
they were stored, so that the pull maps and copies them. Costs are CPU-seconds of all processes that
take part in the pull. `hash_share` is what hashing the mapped chunk files would add to it, and
`copy_share` what copying from mapped pages costs alone. A pull that hashed could not exceed
H / (H + M) of a memcpy: `hash_gb_s` is H, the digest's rate over mapped files, `memcpy_gb_s` is M,
and `sha256_gb_s` the rate of the digest's alternative.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from loadtests.measuring.metered import HostMeter
from loadtests.measuring.processes import cpu_s
from loadtests.measuring.rounds import Arm, ratios, rotated, spread
from loadtests.weights import contents
from loadtests.weights.members.peers import serving, written
from loadtests.weights.scene import Member, Plan, Scene

DTYPE = "bfloat16"
ARMS = ("pull", "memcpy", "gloo", "http", "parts")
FILE = "version"


class Ends:
    def __init__(self, scene: Scene, size: int) -> None:
        self.scene, self.size = scene, size
        self.digest = ""

    async def begin(self) -> None:
        self.store = await self.scene.store()
        self.publisher = await self.scene.publisher()
        self.engine = await self.scene.receiver(0)
        await self.engine.ask("ready", size=self.size, dtype=DTYPE)
        await self.engine.ask("memcpy")  # source of the copied chunks
        meeting = str(self.scene.directory / "meeting")
        self.ranks: list[Member] = []
        for rank in range(2):
            words = (str(rank), meeting)
            member = self.scene.start(
                f"gloo{rank}", 0, "loadtests.weights.members.peers", *words, pipe=True
            )
            await member.await_start()
            self.ranks.append(member)
        ready = [rank.ask("ready", size=self.size, dtype=DTYPE) for rank in self.ranks]
        await asyncio.gather(*ready)
        self.served = self.scene.directory / "served"
        self.served.mkdir()
        kind = contents.DTYPES[DTYPE]
        await asyncio.to_thread(
            lambda: written(contents.drawn(self.size, kind), self.served / FILE)
        )

    async def version(self, number: int) -> None:
        for path in self.chunks():
            path.unlink()
        await self.publisher.ask("make", size=self.size, dtype=DTYPE, seed=number)
        self.digest = (await self.publisher.ask("stage", version=number))["digest"]
        await self.engine.ask("spoil")

    def chunks(self) -> list[Path]:
        return list((self.scene.root(0) / "store").glob("??/*"))

    async def pull(self) -> Arm:
        used = self.store.cpu_s()
        found: Arm = await self.engine.ask("receive", digest=self.digest)
        return found | {"cpu_s": found["cpu_s"] + self.store.cpu_s() - used}

    async def memcpy(self) -> Arm:
        found: Arm = await self.engine.ask("memcpy")
        return found

    async def gloo(self) -> Arm:
        one, other = await asyncio.gather(*(rank.ask("broadcast") for rank in self.ranks))
        return {
            "took_s": max(one["took_s"], other["took_s"]),
            "cpu_s": one["cpu_s"] + other["cpu_s"],
        }

    async def http(self) -> Arm:
        with serving(self.served) as (server, port):
            used = cpu_s(server)
            found: Arm = await self.engine.ask("download", port=port, name=FILE)
            return found | {"cpu_s": found["cpu_s"] + cpu_s(server) - used}

    async def parts(self) -> Arm:
        files = [str(path) for path in self.chunks()]
        found: Arm = await self.engine.ask("parts", files=files)
        return found


async def one_host(plan: Plan) -> Arm:
    """Measure `pull_share_of_memcpy`, `ratio_gloo`, `ratio_http`, `copies_per_byte`."""
    honest = HostMeter()
    found: dict[str, list[Arm]] = {name: [] for name in ARMS}
    copies: list[float] = []
    async with plan.scene() as scene:
        ends = Ends(scene, plan.one_host)
        await ends.begin()
        for number in range(plan.rounds):
            await ends.version(number)
            for name in rotated(ARMS, number):
                if name == "pull":
                    await ends.engine.ask("spoil")
                found[name].append(await getattr(ends, name)())
                if name == "pull":
                    same = await ends.engine.ask("identity") == await ends.publisher.ask("identity")
                    if not same:
                        raise RuntimeError("the engine has other tensors than were published")
                    copies.append(found[name][-1].get("copies_per_byte", -1.0))
    return _summarize(plan, found, copies) | honest.get_validity()


def _summarize(plan: Plan, found: dict[str, list[Arm]], copies: list[float]) -> Arm:
    cpu = {name: [one["cpu_s"] for one in found[name]] for name in ARMS}
    wall = {name: [one["took_s"] for one in found[name]] for name in ARMS}
    answer: Arm = {"one_host_mib": plan.one_host >> 20}
    answer |= spread("pull_share_of_memcpy", ratios(cpu["memcpy"], cpu["pull"]))
    for peer in ("gloo", "http"):
        answer |= spread(f"ratio_{peer}", ratios(cpu[peer], cpu["pull"]))
        answer |= spread(f"ratio_{peer}_wall", ratios(wall[peer], wall["pull"]))
    for part in ("hash", "copy"):
        seconds = [one[f"{part}_s"] for one in found["parts"]]
        answer |= spread(f"{part}_share", ratios(seconds, cpu["pull"]))
    rates = {name: [one[f"{name}_s"] for one in found["parts"]] for name in ("hash", "sha256")}
    for name, seconds in {**rates, "memcpy": cpu["memcpy"]}.items():
        answer[f"{name}_gb_s"] = round(plan.one_host / 1e9 / statistics.median(seconds), 2)
    answer["copies_per_byte"] = max(copies)
    return answer
