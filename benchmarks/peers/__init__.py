"""Run public planners of pipelines over unequal devices from checkouts, and judge their plans by our cost model.

Nothing here downloads anything, and none of their code is here: every peer is a program that is started with files it
reads, and whose output is read. The module of each says what it needs, and the licence of its code.
"""
