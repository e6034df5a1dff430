"""What comes from outside is looked at once, before it is used; everything after trusts it.

    options         the values of Options, and the texts they are made from (--fix, --set, --price)
    fixes           what is fixed, against the model: that it has what the choice is about
    product_dtypes  the precision, against the model: that its products and norms can run in it
    plan            a plan that somebody may have edited, against the model and the cluster

Each raises an error that says what was found, what was expected, and what to do.
"""
