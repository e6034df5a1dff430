"""What a schedule implies for every plan of a mesh, before anything is known of its stages.

schedule_paths: passes that follow each other    rank_paths, longest_paths: the heaviest of them, by weights
peak_moments: when a rank holds most             critical_paths: the path that a plan's replay took
"""
