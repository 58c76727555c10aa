"""What a head is handed before its mesh has ever started: the key pair that its gateway is to have,
and the tokens that are good there. So an orchestrator can give out tokens before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import ConfigError, Damaged, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.host import private
from meshrl.common.mesh.access import identity, tokens
from meshrl.common.mesh.access.identity import Identity
from meshrl.common.mesh.access.records import FILE as TOKENS
from meshrl.common.mesh.access.records import Token
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.places import MeshPlace

FILE = "head.json"  # of `meshrl secrets`
ANOTHER = "Give the head.json of `meshrl secrets`, whole"
LONGEST = 1 << 16  # characters: a file that is larger is none of ours


@dataclass(frozen=True)
class HandedOut:
    """Key pair of the gateway, Z85, and tokens, of which it has digests of the keys alone."""

    public: str
    secret: str = field(repr=False)
    tokens: Sequence[Token]

    def write(self, path: Path) -> None:
        """For its reader's eyes alone. StorageFull."""
        documents.write(path, asdict(self))


def read(path: Path) -> HandedOut:
    """ConfigError: it is none, or others can read it."""
    text = private.text(path, "secrets of a head", ANOTHER, LONGEST)
    try:
        held = documents.decode(text.encode(), str(path))
        found = HandedOut(held["public"], held["secret"], [Token(**t) for t in held["tokens"]])
        if KeyPair.of(found.secret.encode()).public.decode() != found.public:
            raise ValueError("its keys are no pair")
    except (Damaged, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"it holds no secrets of a head: {error}", where=str(path), fix=ANOTHER
        ) from None
    return found


def take(place: MeshPlace, path: Path) -> None:
    """Makes them those of the mesh that starts there for the first time; later there is nothing to
    do. Refused for a mesh that has others.
    """
    given = read(path)
    known = identity.known(place.directory)
    if known is None:
        place.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        tokens.keep_all(place.directory / TOKENS, given.tokens)
        # Last: from then on they are taken. Where it listens the gateway tells when it starts.
        Identity("", "", given.public, given.secret).write(place.directory)
    elif known.public != given.public:
        raise Refused(
            f"the mesh in {place.root} has a gateway's key of its own, and not that of {path}",
            where="--secrets",
            fix="Start it with the file that it was started with first, or without one "
            "(`meshrl token create` makes more tokens); other secrets are for another --root",
        )
