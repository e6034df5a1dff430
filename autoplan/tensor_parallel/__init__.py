"""Tensor parallelism: OpGraph + rules -> a layout for every value of every kind of segment.

rules --op_strategies--> what each op may do --sharding (integer program)--> layouts --layout_cache--> disk
sorted rows --expert_rows--> whose they are            layouts --narrow_loss--> whether the loss takes 16 bits
unknown op --rule_trials, rule_discovery--> a rule, found by trying            layouts --split_names--> words
"""
