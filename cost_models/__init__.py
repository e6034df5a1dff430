"""Cost models: one file per family of ops (`RULES`) and per collective algorithm (`COLLECTIVES`).

    products           matmul, convolution, attention, recurrent, experts (grouped by expert)
    over some dims     reduction, normalization, batch_norm, loss, along_dim (scans, sorts, shifts), spatial (pooling,
                       resizing)
    by element         pointwise, factory (tensors made from nothing)
    which element      embedding, indexing, shape (views and moves)
    of other models    whole_module: modules that were run instead of traced
    collectives        ring, tree, hierarchical, nvls

An entry of `RULES` is an `autoplan.rules.OpRule`, keyed by the name of the operator.

A collective is a function `(size_bytes, route) -> seconds | None`, keyed by (kind, algorithm); None says that the
algorithm cannot run on this route. `size_bytes` is the full, unsharded tensor, for every kind; `route` is the
`autoplan.cost.collective_time.Route` of the group. The cheapest applicable algorithm counts.
"""
