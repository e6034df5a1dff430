"""The output folder of a plan: what stands beside the generated program, and what the program says when it runs.

    Answer --folder (launch_scripts)--> plan.json, reports, trace, launch scripts --`autoplan.files`--> folder on disk
    folder on disk --folder.read_answer--> Answer          --verify: runs it--> predicted beside measured
                                                            --alone: one rank--> its memory

`autoplan.codegen` makes the program, `autoplan.interop` the plan in the words of other programs.
"""
