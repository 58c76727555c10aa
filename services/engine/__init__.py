"""The engine program, which generates tokens behind one actor, whatever engine is inside. Open
`service.py` first.
"""
