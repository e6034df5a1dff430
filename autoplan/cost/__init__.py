"""Cost: what a plan takes, from ops and links to one table of numbers per mesh."""
