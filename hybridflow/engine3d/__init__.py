"""Moves weights from one layout to another: the transition between training and generation, and all other transfers.

Read in this order:

1. `layout`: boxes of canonical tensors on each rank. `offloadable`: tensors whose memory can be released.
2. `plan`: computes moves from two layouts, by the routes and rounds of `routing`. Pure: no communication.
3. `transfer/`: binds a plan to storages and runs it.
4. `hybrid_engine`: an actor's two phases (paper, section 5); `transition`: weights to generation and back, over
interfaces of training and generation engines.
"""
