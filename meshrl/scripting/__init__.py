"""Runs that a Python program or a notebook starts: `meshrl.run`, `meshrl.start`, `meshrl.Run`."""
