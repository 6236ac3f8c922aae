"""Values that planning and running share: splits, schedules, placements, plans, the section of ds_config.json.

Nothing here imports torch.
"""
