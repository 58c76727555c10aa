"""Services of one host and their fork server: plan, start, watch. Open `service_supervisor.py`
first.
"""
