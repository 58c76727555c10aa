"""Growth of a mesh that trains. Open `growing.py` first."""
