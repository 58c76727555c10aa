"""Job files: read, checked and packed. Open `job_reader.py` first, then `checks`."""
