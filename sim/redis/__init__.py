"""Redis inside this process, with a given clock and the real scripts. Open `server.py` first, then
`lua/server.lua`, which stores the keys.
"""
