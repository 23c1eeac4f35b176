"""One loss, or one family of them, per file, with formula and citation; `loss` and `policy` are what they share."""
