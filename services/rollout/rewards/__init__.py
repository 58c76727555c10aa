"""Clients of the processes that score trajectories: sandboxes, frozen models, judges. Open
`sandbox_client.py` first.
"""
