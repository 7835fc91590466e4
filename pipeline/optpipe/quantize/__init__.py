"""Calibration ranges, placement of Q/DQ nodes, layers kept in floating point, and the graphs of all precisions. Builds no engine."""
