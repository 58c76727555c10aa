"""Host agent and the workers that it starts, one for each accelerator. Open `agent.py` first."""
