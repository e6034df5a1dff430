"""Pages to look at: one self-contained HTML file of an answer or of a sweep, and its charts and rows as files.

    answer --plan_charts---> SVG --+
           --plan_rows-----> rows -+--answer_page> HTML       palette, svg, scales    the look
                                   +--chart_files--> files    charts, timeline, ...   rows in, drawing out
    rows   --sweep_charts--> SVG -----sweep_page--> HTML      page                    policy, style, script

table has cards and tables, readings the sentence below each chart, provenance what a figure rests on; mesh_chart draws
the mesh, png turns charts into images. Nothing is requested and only the one script that sorts tables may run; without
it everything is still there.
"""

from __future__ import annotations

from autoplan.html_report.answer_page import chart_files, plan_page

__all__ = ["chart_files", "plan_page"]
