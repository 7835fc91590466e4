"""The parent's side of a measurement: start workers, watch the machine, judge what came back, decide what to ask next."""
