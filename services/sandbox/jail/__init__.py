"""Programs inside jails, and their confinement. Open `init_process.py` first.

They use only the standard library of any Python from 3.9: this folder is mounted into jails and run
by the interpreter that the model's code gets.
"""
