"""What the plan changes in a stage, and how its passes are run.

stage_order      all of it, applied in order          pipeline            stages under one of torch's schedules
zero, packing    what is sharded, and how gradients get to their reduction
compiled         block by block                       cuda_graph          the passes of a step, launched at once
gradient_memory  where reduced gradients lie while they are captured
recompute, kept_attention    activations computed again
chunked_loss     logits a slice at a time             padded_head         rows that start where kernels need them
pieces           which part of each whole tensor a rank holds
batch_norm       whose samples normalize
grad_compression    smaller gradients                 scalar_parameters   parameters without dims
stage_shell      a stage as schedules run it          held_values         what modules hold from step to step
in_place, unused    what users' modules write in place, and which parameters they leave out
"""
