"""What generated code calls under tensor parallelism.

collectives   conversions between layouts, with gradients    attention     of some heads, or of some rows of the query
experts       one rank's experts of a mixture                vocabulary    embedding and loss over parts of the classes
random        dropout of shards
"""
