"""A damaged document of a mesh's hosts says which it is and what to do, and is never taken for
another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshrl.common.base.errors import Damaged
from meshrl.common.base.files import documents
from meshrl.common.mesh.access import hosts, identity, owner, records
from meshrl.directory.joined import HostBook
from meshrl.directory.places import MeshPlace
from meshrl.launch.hosts import membership

READ: dict[str, tuple[Callable[[MeshPlace], Any], str]] = {
    "joined.json": (HostBook.of, "remove it and hosts.json"),
    "hosts.json": (lambda place: hosts.admitted(place.directory), "remove it and joined.json"),
    "owner.json": (lambda place: owner.owner(place.directory), "`meshrl down`, remove it"),
    "tokens.json": (lambda place: records.read(place.directory / records.FILE), "or remove it"),
    "gateway.json": (lambda place: identity.known(place.directory), "or remove it"),
    "membership.json": (membership.known, "join from a new directory"),
}


@pytest.mark.parametrize("name", READ)
def test_a_damaged_document_says_what_to_do(tmp_path: Path, name: str) -> None:
    place, (read, fix) = MeshPlace(tmp_path), READ[name]
    path = place.directory / name
    documents.write(path, {"other": 1})
    other = path.read_bytes()
    for content in (b"", b'{"x":', other.replace(b"1", b"2"), other):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(Damaged, match=f"{name} is damaged") as caught:
            read(place)
        assert fix in caught.value.fix and caught.value.where == str(path)
