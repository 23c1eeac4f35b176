"""Generation beside training, and groups that change their sizes. Read `stream.py` first."""
