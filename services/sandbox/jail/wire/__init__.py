"""Data between jails and the sandbox: frames, channels, plain values. Open `frames.py` first."""
