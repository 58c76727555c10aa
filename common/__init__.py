"""What every program shares; rooms are its parts. Open `runtime/mesh.py` first."""
