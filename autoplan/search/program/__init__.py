"""The integer program of one mesh: what `one_mesh` solves.

formulation --terms: sums of columns--> pass_times: rows of time    memory_rows: rows of memory
"""
