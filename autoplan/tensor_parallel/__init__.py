"""Tensor parallelism: OpGraph + rules -> a layout for every value, by integer programming; rules found by trying."""
