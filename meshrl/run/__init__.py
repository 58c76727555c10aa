"""What is done with a run that there is already: watched, waited for, cancelled, evaluated, talked
with. Open `command_target.py` and `outcome.py` first.
"""
