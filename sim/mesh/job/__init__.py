"""Jobs of a virtual mesh: their files, tasks and arithmetic. Open `job_setup.py` first."""
