"""One advantage estimator per file, with formula and citation; `estimator` has their base."""
