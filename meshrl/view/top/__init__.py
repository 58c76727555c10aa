"""All of a mesh in one frame: jobs, gangs, rates, moves. Open `frame.py` first."""
