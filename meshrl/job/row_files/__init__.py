"""Files of a job's rows: where they are, and their formats."""
