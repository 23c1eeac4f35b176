"""Advantage estimators and losses: pure functions, one per file, with formula and citation."""
