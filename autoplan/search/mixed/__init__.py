"""The search over groups of different hosts.

search, state, answer, rejections    as in the package above
meshes, bounds, plans                pipelines over groups
shares, share_families               data parallelism over groups, each with its own share of the batch
"""
