"""Trackers: where a team keeps its figures. Each sends one dossier, and only when it is asked to.

`contract` says what a tracker is and what it gets, `registry` has optpipe's own and those of other distributions (entry points of the
group `optpipe.trackers`), and each other module is one tracker. Nothing here decides anything: a verdict stands before it is sent.
"""
