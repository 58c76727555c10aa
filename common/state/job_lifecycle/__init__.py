"""A job as a whole, from whether it fits to its deletion. Open `job_status.py` first."""
