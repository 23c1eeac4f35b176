"""What a person sees of a run: metrics, samples, displays, the report. Read `tracker.py` first."""
