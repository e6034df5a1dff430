"""A model on the ranks: built whole and equal, named as the user has it, with each rank's part of the weights.

construction       the user's model, and what a rank keeps    known_values   numbers read while nothing is allocated
weights            parameters of generated blocks             buffers        their dtype in 16 bits
"""
