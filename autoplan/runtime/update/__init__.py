"""From gradients to new weights.

gradients    sums over ranks, global norm, clipping    loss_average     one mean over the targets of the global batch
finite       nothing changes where they are not        loss_scale       of float16
optimizer    the user's own, or AdamW                  learning_rate    over a run
replicas     parameters that ranks hold whole, kept equal
named_parameters    which a rank trains, and of which other stages hold copies
"""
