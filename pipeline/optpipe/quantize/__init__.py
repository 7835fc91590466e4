"""INT8: ranges from calibration data, placement of Q/DQ nodes, layers kept in float; other precisions' graphs. Builds no engine."""
