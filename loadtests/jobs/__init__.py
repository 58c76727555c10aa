"""Several jobs on one mesh, with paced engines and trainers. Open `__main__.py` first."""
