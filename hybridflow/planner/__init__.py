"""From a dataflow graph to the best placement. Pure arithmetic: nothing here starts a process or touches a device.

Read in this order:

1. What is planned: `devices`, `cluster_spec`, `workload`; `graph` (the calls of an iteration), `plans` (where they
   run).
2. What it costs: `simulator`, over `layer_costs`, `links` and `stream`, then `training`, `inference`, `generation`,
   `memory` and `reallocation`; `coefficients`, `calibration` and `profiles` fit it to a machine.
"""
