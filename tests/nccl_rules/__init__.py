"""NCCL's rules without a GPU: gloo ranks record what they post, and a replay holds it to what NCCL demands."""
