"""Values of keys that a job file leaves open, and the memory that the job then takes."""
