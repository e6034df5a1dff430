"""The output folder of a plan: what stands beside the generated program, and what the program says when it runs.

Answer --folder (launch_scripts)--> plan.json, reports, trace, launch scripts --`autoplan.files`--> folder on disk
Answer --interop--> configurations of other training programs
folder --folder.read_answer--> Answer         folder --verify: run it--> predicted beside measured
"""
