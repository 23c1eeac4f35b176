"""One loss per file, with formula and citation; `loss` and `policy` are what they share."""
