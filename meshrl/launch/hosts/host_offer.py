"""Offer of a returning host: its shape when it joined, with new options the head need not know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from meshrl.common.base.host.settings import MeshSettings
from meshrl.launch.hosts.host_launcher import HostShape

GIB, MB = 1 << 30, 10**6


@dataclass(frozen=True)
class HostOffer:
    workers: int = 1
    device: str = "cpu"
    listen: str = ""  # by which others reach it; empty: as it reaches the head
    metrics: str = "127.0.0.1:*"
    market: str = "reserved"
    price: float = 0.0  # of an hour of each worker; 0: that of its market
    notice_source: str = ""  # of preemption notices; empty: none
    memory_gib: float = 0.0
    disk_gib: float = 0.0
    accepts_standby: bool = True
    interface: str = ""  # by which ranks on other hosts reach this one's; empty: that of `listen`
    network: str = ""  # of hosts that a gang may span; empty: the head's
    cache_gib: float = 64.0  # size of the cache of weight chunks
    accepted_services: tuple[str, ...] | None = (
        None  # services that may be placed here; None: as before, all
    )
    advertise: str = ""  # the name by which others reach it; empty: the address in `listen`
    ephemeral: bool = (
        False  # it leaves when it ends; absent for `pool.forget_after_s`, it is removed
    )
    upload_mb_per_s: float = 0.0  # megabytes a second that its processes send; 0: as many as can be
    download_mb_per_s: float = 0.0  # and receive
    given_options: Collection[
        str
    ] = ()  # parameters of the command that were given; others are defaults

    @property
    def shape_fields(self) -> dict[str, tuple[str, Any]]:
        """Fields of the host's shape, with their values, by the parameters that set them."""
        return {
            "market": ("market", self.market),
            "price": ("price", self.price),
            "notice": ("notice_source", self.notice_source),
            "memory": ("memory_bytes", int(self.memory_gib * GIB)),
            "disk": ("disk_bytes", int(self.disk_gib * GIB)),
        }

    @property
    def settings_fields(self) -> dict[str, tuple[str, Any]]:
        """Fields of the host's settings, with their values, by the parameters that set them."""
        return {
            "cache": ("chunks_bytes", int(self.cache_gib * GIB)),
            "rate_up": ("rate_up", int(self.upload_mb_per_s * MB)),
            "rate_down": ("rate_down", int(self.download_mb_per_s * MB)),
            "metrics": ("metrics", self.metrics),
            "network": ("network", self.network),
        }


def apply_offer(
    shape: HostShape, settings: MeshSettings, offer: HostOffer
) -> tuple[HostShape, MeshSettings, list[str]]:
    """Return shape and settings of a returning host with its offer applied, and the rejected
    options.

    The rejected options keep their values from the join, because the head would have to know new
    ones.
    """
    named = set(offer.given_options)
    if offer.accepted_services is not None:
        shape = replace(shape, accepted_services=offer.accepted_services)
    shape = replace(shape, **dict(of for name, of in offer.shape_fields.items() if name in named))
    changed_fields = dict(of for name, of in offer.settings_fields.items() if name in named)
    settings, retained_options = replace(settings, **changed_fields), []
    if {"workers", "no_workers"} & named and offer.workers != shape.workers:
        retained_options.append(f"--workers {shape.workers}")
    if "device" in named and offer.device != shape.device:
        retained_options.append(f"--device {shape.device}")
    if offer.ephemeral and not shape.ephemeral:
        retained_options.append("not --ephemeral")
    if not offer.accepts_standby and shape.planner_name:
        retained_options.append("--standby")
    return shape, settings, retained_options
