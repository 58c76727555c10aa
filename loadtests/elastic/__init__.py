"""A job that turns into another along its run, with the planner and with splits that stay. Open
`__main__.py` first.
"""
