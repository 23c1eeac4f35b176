"""One loss, or two that are alike, per file, with formula and citation; `loss` and `policy` are what they share."""
