"""`meshrl leave`: this host ends its part of the mesh, and both forget each other."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.api.gateway import Gateway
from meshrl.common.base.errors import DeadlineExceeded, NotAllowed, NotFound, PeerLost
from meshrl.directory.directory_paths import MeshPaths, find_mesh
from meshrl.launch import shutdown
from meshrl.launch.hosts import membership
from meshrl.launch.hosts.host_join import call_gateway

CALL_TIMEOUT_S = 30.0


def leave_mesh(root: Path | None, force: bool) -> None:
    """End what runs here in order, then make the mesh forget the host. With `force` the host
    forgets the mesh also when the head is unreachable.
    """
    place = MeshPaths(root.absolute()) if root is not None else find_mesh(None)
    member = membership.read_membership(place)
    if member is None:
        raise NotFound(
            f"no host in {place.root} has joined a mesh",
            fix="Run `meshrl leave --root DIR` with a host's directory, or `meshrl down` to "
            "stop a mesh",
        )
    shutdown.stop_root_process(place, leave_mesh=True)
    try:
        call_gateway(
            member.member_token, lambda line: line.call(Gateway.leave, None, CALL_TIMEOUT_S)
        )
    except (NotAllowed, NotFound):
        pass  # the mesh has forgotten the host
    except (PeerLost, DeadlineExceeded) as error:
        if not force:
            raise type(error)(
                f"reporting to the head that {member.host} leaves failed: {error.message}",
                where=error.where,
                fix=f"Retry, or use --force, then run `meshrl keys revoke {member.host}` at "
                "the head to remove this host",
            ) from error
    membership.delete_membership(place)
    print(f"{member.host} has left the mesh")
