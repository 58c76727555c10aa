"""What runs inside of jails, and what closes them. Only the standard library, any Python from 3.9:
this folder is mounted into jails and run by the interpreter that the model's code gets.
"""
