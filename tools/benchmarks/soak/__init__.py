"""A long run on nodes to which faults happen, and its undisturbed twin.

*Event*: a fault, or two that come one soon after the other. *Sitting*: the time in which one process lets events
happen; a soak may take several. *Whole*: of a cluster, all its nodes train.
"""
