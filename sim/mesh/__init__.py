"""The virtual mesh: the product's own processes in one real process, under virtual time and drawn
faults. Open `running.py` first, then `world/world.py`.
"""
