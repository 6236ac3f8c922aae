"""Adapters of DeepSpeed, transformers, accelerate and TRL; `names` of each lists the private names it builds on."""
