"""What a plan is made for: cluster, workload, the graph of calls, meshes, and the constraints of the user."""
