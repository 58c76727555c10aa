"""Commands on an existing run: watch, wait, cancel, evaluate, chat. Open `command_target.py` and
`outcome.py` first.
"""
