"""Health of a run: rules over the rows of its steps that find a job that cannot learn."""
