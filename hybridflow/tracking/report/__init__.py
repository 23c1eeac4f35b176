"""Reports of a run: its events, the limits of its iterations, timelines and pages."""
