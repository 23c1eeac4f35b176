"""Inputs of a plan: cluster, workload, the graph of calls, meshes, and the user's constraints."""
