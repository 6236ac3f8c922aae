"""The terms of a cost model, a formula or two per file: times of exchanges, rings and ZeRO, operations, memory."""
