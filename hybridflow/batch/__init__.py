"""Rows of named columns: `batch`, its `columns`, `ragged` ones, other `formats`; `row_split`: which row goes where."""
