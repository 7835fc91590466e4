"""Everything that optpipe knows about a figure that it measures, judges, or shows: one object for each.

`contract` says what a metric is, `measured` holds the figures of a measurement, `scores` those of tasks, `sections` the
tables of a policy that limit them, and `registry` joins them with the metrics of other distributions (entry points of the
group `optpipe.metrics`). No other room compares a metric's name (tests/unit/core/test_metrics.py): it asks the object.
"""
