"""Searches for the fastest placement of a graph whose `Costs` are known. `planning` runs them."""
