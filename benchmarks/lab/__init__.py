"""The heterogeneity lab: really unequal ranks on one machine, and what schedules gain on them.

    python -m benchmarks.lab ring      two ranks, the second slowed down: the hetero-ring paper's figure
    python -m benchmarks.lab mesh      four ranks in two unequal nodes with a slow link: all contenders
    python -m benchmarks.lab growth    step time and bytes on the wire against ranks and tokens
    python -m benchmarks.lab kept      attention kept over recomputation, against computing it again
    python -m benchmarks.lab qlora     QLoRA in the planned pipeline, against device_map="balanced"
    python -m benchmarks.lab experts   experts divided by speed, against equal numbers of experts
    python -m benchmarks.lab replan    a rank slows down in the middle of a run
    python -m benchmarks.lab.launch    any command of yours on such a cluster

Everything measured here is *emulated* heterogeneity: equal cores, some of them given less time. It shows that work goes
where it should and what is lost on the way, not how fast any GPU is.
"""
