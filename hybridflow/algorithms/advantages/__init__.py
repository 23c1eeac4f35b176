"""One advantage estimator per file, with formula and citation; `estimator` is what they share."""
