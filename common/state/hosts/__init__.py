"""What lets many hosts into a mesh: admission, doors, rights in Redis. Open `acl.py` first."""
