"""One advantage estimator, or one family of them, per file, with formula and citation; `estimator` has their base."""
