"""What outlives a process: checkpoints, recovery and replay of a run. Read `checkpoints.py` first."""
