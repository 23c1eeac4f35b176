"""Seconds and bytes of calls, of weights that move between them, and of whole iterations. `costs` first."""
