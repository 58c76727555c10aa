"""Jobs at declared paces on the real mesh, which need little arithmetic. Open `job.py` first."""
