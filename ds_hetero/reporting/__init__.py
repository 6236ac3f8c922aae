"""Files that describe a plan and its runs: plan with scenario, run.json, HTML page, trace, launch files."""
