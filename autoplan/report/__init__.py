"""Reports: answers as text for a terminal, and a predicted step as a trace; pages are in `html_report`."""
