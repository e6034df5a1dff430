"""The simulator: replays one plan event by event, and is the only judge of its step time and memory.

CostTable + stages --replay--> when each action runs --simulate--> Estimate
    stage_pass: one pass of a stage    rank_memory: bytes of a rank    shared_step: ranks with unequal batches
"""
