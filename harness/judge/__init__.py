"""Numbers to verdicts. Pure: the same evidence, criteria and judge version give the same bytes.

`signoff.judge_run` is the way in; `validity` says which trials count, `decide` turns a number into
a verdict, `power` says how often `decide` decides.
"""
