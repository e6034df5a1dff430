"""From what a user names to an answer.

    names, options --problem--> Problem --deciding (confidence, search, judge)--> SearchResult --answering--> Answer
    Answer --questions, each a search again--> why not that plan, what a better cluster is worth

untried says what was not looked at and might be better. What is found are values of `autoplan.answers`.
"""
