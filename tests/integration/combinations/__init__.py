"""Random jobs, each trained some steps on ranks and held against one process: exact, or refused by name on all ranks.

python -m tests.integration.combinations --seed 7 --draws 1000              # a thousand of them
python -m tests.integration.combinations --seed 7 --only 42                 # one of them again, with all it prints

draw        which job a number of a seed is
families    architectures of transformers: padding, packing, documents, recomputation, adapters
loops       loops around deepspeed.initialize: losses, modules, optimizers, loaders, evaluation, resume, replan
accelerated loops with accelerate
trainer     the Hugging Face Trainer
pipelines   pipelines of stages, tensor-parallel ones among them
unequal     batches of unequal sizes for plain modules
losses, modules, optimizers, loaders: what these jobs are made of
compare     what a job came to, and whether that is the same
running     jobs in few starts of ranks; a draw that hangs is ended by its own timeout
"""
