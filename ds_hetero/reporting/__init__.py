"""What people look at: a plan that says what it was made for, what a run measured, the page and the trace of both."""
