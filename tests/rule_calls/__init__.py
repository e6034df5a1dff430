"""Calls of every operator that has a rule: name -> (function of x: [batch, 8, 12] and the parameters, their shapes).

A shape that starts with 0 is that of a buffer. A function may return several tensors; all of them are checked.
"""

from rule_calls import pointwise, products, reductions, shapes

CALLS = {**pointwise.CALLS, **products.CALLS, **reductions.CALLS, **shapes.CALLS}
