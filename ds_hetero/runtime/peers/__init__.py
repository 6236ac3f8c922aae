"""Find out why a rank waits in vain, and end the job with an error that says so.

calls         records the calls of this rank that all ranks have to make together
posted_calls  records the collectives and messages that this rank has posted, on NCCL
stack         reads a stack of Python frames
main_thread   finds where the main thread of this process is
processes     tells whether the processes of this host still run
board         entries in the key-value store, by which ranks tell each other where they are
diagnosis     concludes from the entries of all ranks why the job cannot go on
watch         two threads that write entries, ask the other ranks, and end a process that waits in vain
forced_exit   functions to call before the watch ends the process
"""
