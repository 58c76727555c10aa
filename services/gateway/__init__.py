"""The gateway: the mesh's door for people who hold a token. Open `gateway_actor.py` first."""
