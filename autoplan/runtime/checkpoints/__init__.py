"""Saved runs: what of a run is saved, how it lies in files, and how any other plan reads it.

checkpoint    saved beside the training, loaded under any plan    state          what of a ParallelModel it has
folder        complete or not at all, and the old ones removed    folder_lock    one job at a time
planner       pieces of whole tensors, written and read
host_copies   copies in host memory beside the training           weight_files   weights alone, under the user's names
"""
