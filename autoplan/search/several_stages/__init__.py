"""Several stages per rank: bounds, and plans without a solver.

rank_shares, stage_needs: the least that one rank, or one stage, takes and holds
joint_sizes: all ranks together, for all sizes of stages
path_weights: and for all ways to recompute, by weights of the paths of the schedule
least_recomputation: a plan that recomputes about as little as will do
"""
