"""Everything measured, side by side: rows, best, frontier, speed-ups, and the data of the report. Measures nothing."""
