"""Pipelines of unequal stages on an emulated cluster: `python -m benchmarks.pipelines`."""
