"""From what a user names to an answer.

names, options --problem--> Problem --deciding (search, judge)--> SearchResult --answering--> Answer
(untried: what was not looked at)
Answer --questions, each a search again--> comparisons: why not that plan, what a better cluster is worth
"""
