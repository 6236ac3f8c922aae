"""Files for people: a plan with its scenario, the record of a run, the page and the trace of both."""
