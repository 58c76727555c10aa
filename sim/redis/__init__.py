"""A Redis inside this process, by a given clock and with the real scripts; open `server.py` first,
then `lua/server.lua`, where its keys live beside the scripts that read them.
"""
