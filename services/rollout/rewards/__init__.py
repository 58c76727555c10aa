"""Clients of all that scores trajectories: sandboxes, frozen models, judges. Open
`sandbox_client.py` first.
"""
