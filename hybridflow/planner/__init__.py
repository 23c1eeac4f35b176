"""From a dataflow graph to the best placement. Pure arithmetic: nothing here starts a process or touches a device.

Read in this order:

1. What is planned: `devices`, `cluster_spec`, `workload`; `graph` (the calls of an iteration), `plans` (where they
   run).
2. What it costs: `simulator`, over `backends`, `layer_costs`, `links`, `stream` and `sharding`, then `training`,
   `inference`, `generation`, `memory` and `reallocation`; `coefficients`, `calibration` and `profiles` fit it to a
   machine. `timeline` says when each call runs, and `sharing` what calls that run at once cost each other.
3. What is searched: `space` under `constraints`; `auto_mapping` places groups by the seconds of their `stages`,
   `overlap` by timelines; `exact` and `mcmc` place calls. `planning` is the one entry, `shortage` what it says of a
   cluster that is too small. `similarity` is for an actor alone: its best pair of layouts on given devices.
"""
