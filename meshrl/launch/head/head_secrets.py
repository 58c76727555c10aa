"""Secrets of a head from before its mesh's first start: the gateway's key pair and valid tokens.

With them an orchestrator can hand out tokens before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshrl.common.base.errors import ConfigError, CorruptData, Refused
from meshrl.common.base.files import documents
from meshrl.common.base.host import secret_files
from meshrl.common.mesh.access import gateway_identity, token_registry
from meshrl.common.mesh.access.access_records import RECORDS_FILE as TOKENS
from meshrl.common.mesh.access.access_records import TokenRecord
from meshrl.common.mesh.access.gateway_identity import GatewayIdentity
from meshrl.common.mesh.transport.keys import KeyPair
from meshrl.directory.directory_paths import MeshPaths

HEAD_FILE = "head.json"  # of `meshrl secrets`
FILE_HINT = "Pass the complete head.json of `meshrl secrets`"
MAX_FILE_CHARS = 1 << 16  # characters: a file that is larger is none of ours


@dataclass(frozen=True)
class HeadSecrets:
    """Key pair of the gateway, Z85, and tokens with digests of their keys alone."""

    public: str
    secret: str = field(repr=False)
    tokens: Sequence[TokenRecord]

    def write(self, path: Path) -> None:
        """Write the secrets, readable by this user alone. Raises StorageFull."""
        documents.write(path, asdict(self))


def read_head_secrets(path: Path) -> HeadSecrets:
    """Read the secrets. Raises ConfigError if the file is invalid, or readable by others."""
    text = secret_files.read_secret(path, "secrets of a head", FILE_HINT, MAX_FILE_CHARS)
    try:
        document = documents.decode(text.encode(), str(path))
        found = HeadSecrets(
            document["public"], document["secret"], [TokenRecord(**t) for t in document["tokens"]]
        )
        if KeyPair.from_secret(found.secret.encode()).public.decode() != found.public:
            raise ValueError("its keys do not form a pair")
    except (CorruptData, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the file has no valid secrets of a head: {error}", where=str(path), fix=FILE_HINT
        ) from None
    return found


def install_head_secrets(mesh_paths: MeshPaths, path: Path) -> None:
    """Install the secrets in the mesh before its first start; do nothing later.

    Raises Refused for a mesh that has other secrets.
    """
    head_secrets = read_head_secrets(path)
    known = gateway_identity.find_identity(mesh_paths.directory)
    if known is None:
        mesh_paths.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        token_registry.add_missing_tokens(mesh_paths.directory / TOKENS, head_secrets.tokens)
        # Last: it marks the secrets as installed. The gateway reports its address when it starts.
        GatewayIdentity("", "", head_secrets.public, head_secrets.secret).write(
            mesh_paths.directory
        )
    elif known.public != head_secrets.public:
        raise Refused(
            f"the mesh in {mesh_paths.root} has another gateway key than {path}",
            where="--secrets",
            fix="Start it with the secrets file of its first start, or without one (`meshrl "
            "token create` makes more tokens). Use other secrets with another --root",
        )
