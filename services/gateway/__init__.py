"""Gateway: the mesh's endpoint for users with an access token. Open `gateway_actor.py` first."""
