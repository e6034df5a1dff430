"""A plan in the words of other training programs: the configuration that comes closest, and what it cannot say.

    Plan x Workload = Subject --targets.TARGETS[name]--> Configuration: a file, how to use it, and what is not expressed

torchtitan, megatron, deepspeed and accelerate are the programs, subject what all of them start from. A field is written
only where its documentation gives it the plan's meaning; what has no field is listed, never approximated in silence.
Other programs run their own model code, so layouts of tensor parallelism and what is fused are theirs; the estimate
holds for the program of the plan, not for them. `targets.SOURCES` has the version and documentation of each.
"""
