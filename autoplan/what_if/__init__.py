"""What-if: the same model on other clusters, one search per point, and what a run there takes, costs and draws.

    Question --points--> Point --search, in processes, cached--> PointResult --conditions, money--> WhatIfRow
    WhatIfRow --> text (`row_text`), CSV, JSON (`row_tables`), Recommendation (`recommending`), Advice (`advising`)

    question      the question, made by flags from the command line, and from a file by table_values, condition_tables
    asking        the whole way, with sweep: many points, each kept, by a worker_pool that an interrupt ends; prices
                  other_links: clusters with those
                  other_sizes: a plan serves every cluster that has its devices; all_schedules: and may have others
    rows          what a row says, from conditions, goodput (failures) and money
    texts         row_text, loss_text, report_text, recommendation_text, advice_text
    recommending  and answer_changes: what would make it another one
    advising      and advising_mixed, by advice_rules over advice_facts

A `PointResult` is physics: the best plan of a cluster, its step and memory. A `WhatIfRow` (module `rows`; every field
has its unit in its name, what is unknown is None) adds what the user says of failures, loading and prices, and needs
no search: another price or failure rate changes rows in microseconds.

`WhatIfRow.shares` are (loss, share of wall time) pairs in the order of `rows.SHARES`; they sum to 1.
"""

from autoplan.what_if.points import Point, PointResult
from autoplan.what_if.row_tables import whatif_csv, whatif_schema, whatif_to_dict
from autoplan.what_if.row_text import whatif_table
from autoplan.what_if.rows import WhatIfRow

__all__ = ["Point", "PointResult", "WhatIfRow", "whatif_csv", "whatif_schema", "whatif_table", "whatif_to_dict"]
