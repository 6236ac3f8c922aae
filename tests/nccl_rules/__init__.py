"""NCCL's rules without a GPU: what gloo ranks post is recorded, and `benchmarks.proof.order` judges it."""
