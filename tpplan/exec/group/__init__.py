"""The group of processes that run one plan: they meet, tell each other plain data, and find who is lost.

``process_group`` makes a group of torch.distributed, in which processes have a ``meeting``. What they tell each other
is plain data, which ``telling`` checks; ``members`` compares what they claim. ``transport`` carries the messages of
operations, and ``lost`` finds the first cause where torch.distributed fails.
"""
