"""The 3D-HybridEngine (paper, section 5).

`hybrid_engine` has the two phases of an actor; `transition` moves weights to generation and back.
"""
