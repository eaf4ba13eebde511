"""What will be run: campaign and criteria files, and the plan made of them. Starts nothing.

The way in is `reading.load_campaign`, then `plan.make_plan`.
"""
