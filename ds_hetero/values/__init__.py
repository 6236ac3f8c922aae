"""Values that both halves share: splits, schedules, placements, plans, the section of ds_config.json. No torch."""
