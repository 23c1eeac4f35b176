"""Reports of a run from the files that it wrote. Pure: reads a directory, writes a file."""
