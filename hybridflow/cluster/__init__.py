"""Pools, hosts, groups and references. Read `group`, `batch_ref`, then `session` and `ray_backend`, then `host`."""
