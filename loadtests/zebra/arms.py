"""What is compared: ways to compute the same sequences on two fast accelerators and two slow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from meshrl.common.hardware.zebra.asymmetry import ExpertHosting, HostingBounds, RankCounts, hosting
from meshrl.common.hardware.zebra.batches import spread
from meshrl.common.hardware.zebra.costs import Costs
from meshrl.common.hardware.zebra.kinds import declared_profile
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, Profile
from meshrl.common.hardware.zebra.shapes import costs_of
from meshrl.common.hardware.zebra.timeline import Timeline, serial_s, timeline
from meshrl.services.trainer.bins.division import ZebraDivision
from meshrl.sim.zebra.setups import MODELS

FAST, SLOW = "A40", "V100"
COUNT = 2  # of either kind
MICROS = 4  # micro-batches of an attention rank in a step
TOKENS = 96  # of a real micro-batch: as many rows for each expert, as it is routed
LINK_BYTES_PER_S = 12.5e9  # 100 Gb/s
FREE_BYTES_PER_S = 1e30
WORTH = 1.1  # that experts on attention ranks are to bring by the list schedule, to be an arm
LONGEST_S = 0.16  # that the longest task takes here


@dataclass(frozen=True)
class Setting:
    """A model of the source at one length of sequences."""

    model: str
    length: int
    tokens: int = TOKENS  # of a real micro-batch
    longest_s: float = LONGEST_S  # that the longest task takes here

    @cached_property
    def profile(self) -> Profile:
        """Declared, of both kinds."""
        shape = MODELS[self.model].shape
        return declared_profile(shape, FAST, SLOW, link_bytes_per_s=LINK_BYTES_PER_S)

    @cached_property
    def costs(self) -> tuple[Costs, float]:
        """Of a micro-batch of one sequence, in declared seconds: see `costs_of`."""
        profile = self.profile
        assert profile.fast.attention is not None
        batches = spread({self.length: COUNT * MICROS}, COUNT * MICROS, profile.fast.attention)
        assert batches is not None
        return costs_of(profile, RankCounts(COUNT, COUNT), batches)

    @cached_property
    def hosting(self) -> ExpertHosting:
        """What Asym-EA puts on attention ranks; memory sets no bounds here."""
        costs, elsewhere = self.costs
        profile, ranks = self.profile, RankCounts(COUNT, COUNT)
        bounds = HostingBounds(0, profile.layers * profile.experts)
        about = profile.layers, MICROS, profile.experts, ranks, costs, elsewhere, bounds
        return hosting(*about)

    @property
    def scale(self) -> float:
        """Real seconds of a declared one."""
        costs, _ = self.costs
        return self.longest_s / max(costs.attention, costs.experts) / costs.backward

    @property
    def balance(self) -> float:
        """What experts take over what attention takes."""
        costs, _ = self.costs
        return costs.experts / costs.attention

    def simulated(self, asymmetric: bool) -> Timeline:
        """A step of the gang as the list schedule has it, in declared seconds."""
        costs, elsewhere = self.costs
        if asymmetric:
            costs = self.hosting.costs(costs, elsewhere)
        return timeline(self.profile.layers, MICROS, costs)

    @property
    def serial_s(self) -> float:
        """The same without overlap, in declared seconds."""
        return serial_s(self.profile.layers, MICROS, self.costs[0])


@dataclass(frozen=True)
class Arm:
    """A way to compute a step of COUNT * MICROS sequences on four ranks."""

    name: str
    division: ZebraDivision
    rounds: int  # that make a step
    links: bool = True  # whether transfers take time

    def profile(self, setting: Setting) -> Profile:
        """What its ranks stand for."""
        profile = setting.profile
        if self.links:
            return profile
        return replace(profile, link_bytes_per_s=FREE_BYTES_PER_S, link_latency_s=0.0)

    def kind(self, profile: Profile, rank: int) -> AcceleratorCosts:
        """What a rank stands for."""
        return profile.fast if rank < COUNT else profile.slow


def arms(setting: Setting) -> list[Arm]:
    """Those of a setting; where hosting would bring little, it is no arm."""
    layers, experts = setting.profile.layers, setting.profile.experts
    none, ranks = (0,) * layers, 2 * COUNT
    found = [
        Arm("zebra", ZebraDivision(COUNT, COUNT, MICROS, none), 1),
        Arm("free", ZebraDivision(COUNT, COUNT, MICROS, none), 1, links=False),
        Arm("distep", ZebraDivision(COUNT, COUNT, 1, none), MICROS),
        Arm("ep", ZebraDivision(ranks, 0, 1, (experts // ranks,) * layers), MICROS // 2),
    ]
    if setting.simulated(False).makespan > WORTH * setting.simulated(True).makespan:
        found.append(
            Arm("asymmetric", ZebraDivision(COUNT, COUNT, MICROS, setting.hosting.hosted), 1)
        )
    return found
