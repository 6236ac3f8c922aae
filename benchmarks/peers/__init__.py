"""Public planners of pipelines over unequal devices, run from checkouts and judged by our cost model.

Nothing here fetches anything, and no code of theirs is here: every peer is a program that is started with files it can
read, and whose output is read back. What each needs is in its module, with the licence of its code.
"""
