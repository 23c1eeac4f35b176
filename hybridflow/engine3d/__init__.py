"""The transition between training and generation, and every other way of weights from one layout to another.

Read in this order:

1. `layout`: boxes of canonical tensors, where ranks keep them. `offloadable`: which tensors have memory, and how much.
2. `plan/`: from two layouts to moves. Pure: no communication.
3. `transfer/`: a plan bound to storages, and run.
4. `hybrid/`: an actor's two phases, over `interfaces` of training and generation engines.
"""
