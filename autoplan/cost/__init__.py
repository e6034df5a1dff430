"""Cost: what a plan takes, from ops and links to one table of numbers per mesh.

op_time, collective_time, launch, batch, waits    one op, one collective, the host, a copy, what lies between
local_segment -> segment_work -> segment_cost     one kind of segment: its ops, their sum, with parameters and again
kept_tensors, handed_on                           what autograd keeps of a segment, and who counts it
measured, chunked_loss, kept_attention, grad_compression    what changes the work
fusions -> compiled_work                          the work where a segment is compiled: its ops as fused kernels
works                                             the work of all kinds, as they run: eager, compiled, measured
parameters, calls                                 what is kept beside it, and by which call of a block
boundaries, between, outside_allocator            between stages, between groups of hosts, outside of the allocator
price, mixed_price (several kinds of hosts) -> table    OpGraph x Mesh x HardwareProfile -> CostTable

layout_prices are the prices of `tensor_parallel.sharding`; rank_segments and work_context keep what meshes share.
"""
