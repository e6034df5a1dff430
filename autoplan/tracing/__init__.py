"""Tracing: a user's model -> OpGraph, by `torch.export` and a second run; or of whole modules where that fails."""
