"""What runs inside jails, and what closes them. Open `init_process.py` first. It uses only the
standard library of any Python from 3.9: this folder is mounted into jails and run by the
interpreter that the model's code gets.
"""
