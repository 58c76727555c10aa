"""The services of one host and their fork server: planned, started, watched. Open
`service_supervisor.py` first.
"""
