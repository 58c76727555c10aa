"""Admission of jobs, their numbers of workers, and the hosts that their services may use."""
