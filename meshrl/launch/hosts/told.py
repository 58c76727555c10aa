"""What a mesh tells a host of itself, when it joins or asks anew, in the host's own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.api.gateway import RedisLocation
from common.base.host.settings import MeshSettings
from meshrl.directory.places import MeshPlace
from meshrl.launch.hosts.membership import AUTHORITY


def authority_in(place: MeshPlace, authority: str) -> str:
    """The file of the certificate that Redis' is signed with; empty: there is none."""
    path = place.directory / AUTHORITY
    if authority:
        path.write_text(authority)
    return str(path) if authority else ""


def shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that all hosts share which this version knows."""
    known = MeshSettings.__dataclass_fields__
    return {name: value for name, value in settings.items() if name in known}


def keep(place: MeshPlace, told: RedisLocation) -> None:
    """Puts what was told anew into the settings of a host that comes back."""
    authority = authority_in(place, told.authority)
    before = MeshSettings.from_file(place.settings)
    now = replace(before, redis_url=told.redis_url, authority=authority)
    replace(now, **shared(told.settings)).to_file(place.settings)
