"""Faults planted in training jobs: are they found at the step where they begin, and named?

job       one job: a script that trains tiny models on ranks, and the same script on one process
known     faults that were found once by trying (A1 to A11)
own       faults that a user makes, or a framework that changes
controls  scripts that look odd and are right
trainers  those of them that need the HF Trainer or accelerate
verdict   what became of a job
"""
