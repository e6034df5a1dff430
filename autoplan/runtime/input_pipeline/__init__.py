"""Batches: how they are read and ordered, what each rank takes of them, and samples that make none.

batches        what a rank takes of a global batch    reading      the order of a dataset's samples
loading        the data of a run, step by step        samples      why samples make no batch, or another than planned
rehearsal      a batch tried before a step            same_batch   whether ranks that share samples have the same
model_calls    the user's model and loss on them      memory_format    images in channels_last
"""
