"""Virtual mesh: the product's own processes in one real process, under virtual time and drawn
faults. Open `seed_runner.py` first, then `runtime/virtual_mesh.py`.
"""
