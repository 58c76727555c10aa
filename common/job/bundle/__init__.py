"""Files of a job, from its author to its processes. Open `job_data.py` first."""
