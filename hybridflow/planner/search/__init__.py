"""Searches for the fastest placement of one search problem. `planning` runs them, `problem` is what they share."""
