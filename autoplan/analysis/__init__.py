"""What follows from an OpGraph alone, whatever the cluster.

    chunked_loss      whether the loss may be computed in slices of its rows, and which ops that replaces
    head_group        whether the head may be gathered and reduced by itself
    attention_kernel  which kernel torch takes for attention
    idle_ops          which ops hand their operand through
    memory_order      which values are transposed views, and of which the numbers of a row lie apart
    kept_attention    which attention torch runs as one kernel, whose result recomputation may keep
    captured          whether the passes of a plan can be a CUDA graph
    uncompiled        why torch may not compile the blocks, where these write buffers that they compute with
    executions        which segments a compiled program compiles, and which read images
    random_numbers    which ops draw random numbers
    padded_head       whether products with a head run faster with padded classes, and the graph that says so
    across_samples    which op mixes the samples of a batch, or adds them up
    semantics         what a plan changes in the meaning of the model, in sentences
    float32_buffers   which buffers stay in float32 where a program computes in 16 bits
    mixed_operands    products and norms of two dtypes, which a model has right in fp32 alone
    model_flops       the FLOPs of one sample, and the operators that no rule knows

Prices, checks, generated code and reports ask for it. A module of the same name in `cost/` says what the thing takes,
and in `runtime/` how a program does it.
"""
