"""`meshrl top`: all of a mesh in one frame: jobs, gangs, rates, moves. Open `showing.py` first."""
