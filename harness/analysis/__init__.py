"""Evidence to numbers. Pure: no path, clock, environment or network; judges nothing.

`numbers.measure_run` is the way in: it reads trials. `oracles` compares outputs, `measures`
computes what criteria ask for, `cells` what charts show.
"""
