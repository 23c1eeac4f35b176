"""Benchmark programs: each prints one JSON line; figures are compared within one run only."""
