"""Benchmark of pipelines with unequal stages on an emulated cluster: `python -m benchmarks.pipelines`."""
