"""Program that hosts a job's frozen models. Open `frozen_models.py` first."""
