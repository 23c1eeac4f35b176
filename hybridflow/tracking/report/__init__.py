"""What a run was: its events, what limits its iterations, timelines, and pages made of them."""
