"""One problem as numbers for the search: the model and the cluster go in, a space of meshes with prices comes out.

    layouts       the tensor-parallel programs of every degree
    choices       what the options fix, and what they leave to the search
    priced        layouts + choices --> PricedSpace: meshes, price(mesh) -> CostTable, make_plan
    plan_maker    mesh and stages --> Plan
    mixed_space   the same for a cluster of several kinds of hosts

current_code says which measurements of generated code are of the code of today. The search knows
neither model nor cluster; this is where they end.
"""
