"""Benchmark programs: each prints one JSON line. Compare results of the same run only."""
