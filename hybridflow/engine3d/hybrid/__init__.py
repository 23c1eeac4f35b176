"""The 3D-HybridEngine (paper, section 5).

`hybrid_engine` switches an actor between two phases; `transition` moves weights to generation and back.
"""
