"""Linear programs: data, and the only place that knows a solver.

    LinearModel (linear_model) --solve.minimize: HiGHS, checked--> Solution

second_solver looks for a better one where a proof is claimed.
"""
