"""Reports: answers as text for a terminal, and a predicted step as a trace; pages are in `html_report`.

    Answer --plan (rivals: why not the next; stages: what each has), explain, ops, memory_parts--> text
    Estimate --chrome_trace--> trace.json
    HardwareProfile --hardware--> text        measured rows --measured_profile--> text
    sources and values --figures--> text, in both

The words and tables that all of them share are `autoplan.plan_words` and `autoplan.plain_text`.
"""
