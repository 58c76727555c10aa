"""`meshrl leave`: this host ends its part of the mesh, which forgets it, and it the mesh."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.api.gateway import Gateway
from meshrl.common.base.errors import DeadlineExceeded, NotAllowed, NotFound, PeerLost
from meshrl.directory.places import MeshPlace, find_mesh
from meshrl.launch import ending
from meshrl.launch.hosts import membership
from meshrl.launch.hosts.joining import at_gateway

ASK_S = 30.0


def leave(root: Path | None, force: bool) -> None:
    """Ends what runs here in order, then has the mesh forget the host. With `force` the host
    forgets the mesh also when the head cannot be told.
    """
    place = MeshPlace(root.absolute()) if root is not None else find_mesh(None)
    member = membership.known(place)
    if member is None:
        raise NotFound(
            f"no host in {place.root} has joined a mesh",
            fix="`meshrl down` stops a mesh; `meshrl leave --root DIR` names a host's directory",
        )
    ending.end(place, leaves=True)
    try:
        at_gateway(member.ticket, lambda line: line.call(Gateway.leave, None, ASK_S))
    except (NotAllowed, NotFound):
        pass  # it knows the host no more
    except (PeerLost, DeadlineExceeded) as error:
        if not force:
            raise type(error)(
                f"the head cannot be told that {member.host} leaves: {error.message}",
                where=error.where,
                fix="Try again, or --force: then `meshrl keys revoke "
                f"{member.host}` at the head makes it forget this host",
            ) from error
    membership.forget(place)
    print(f"{member.host} has left the mesh")
