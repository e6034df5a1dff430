"""Cost models: one file per family of ops (`RULES`) and per collective algorithm (`COLLECTIVES`).

A collective is a function `(size_bytes, route) -> seconds | None`, keyed by (kind, algorithm); None says that the
algorithm cannot run on this route. `size_bytes` is the full, unsharded tensor, for every kind; `route` is the
`autoplan.cost.collective_time.Route` of the group. The cheapest applicable algorithm counts.
"""
