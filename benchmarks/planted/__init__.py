"""Plant faults in training jobs: are they detected at the step at which they begin, and named?

job         one job: a script that trains tiny models on ranks, and the same script on one process
reported    faults that were found by trying an earlier revision (A1 to A11)
unforeseen  other mistakes of users, and changes of frameworks
controls    scripts that look wrong and are right
trainers    jobs that need the HF Trainer or accelerate
verdict     judges the end of a job
"""
