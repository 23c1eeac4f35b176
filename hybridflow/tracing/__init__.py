"""Drivers run without processes: `trace` records the graph of a loop, `auto` plans and places a driver."""
