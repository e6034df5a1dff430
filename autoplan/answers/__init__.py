"""Answers as values: what was asked, what was found, how sure it is; read and written as JSON, shown by reports.

    answer         Answer = request + workload + SearchResult, its derived figures, its JSON
    intervals      how far a prediction may be off: errors of earlier ones, and the interval that follows
    comparisons    an answer beside another one: why not that plan, what a better cluster is worth

`planning` makes them.
"""
