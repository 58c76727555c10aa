"""The routing of turns: which engine takes one, when, and whether its cache goes along. Open
`router.py` first.
"""
