"""Rows of named columns: `batch`, its `columns`, `ragged` columns, other `formats`; `row_split` assigns rows to
parts."""
