"""`pyinertia bench`: speed and memory of our policies beside their rivals, all in one run.

settings   what was asked for, checked
sides      the contestants, each a process of its own
worker     what such a process runs
measure    who measures when
summary    raw repeats to medians with their spread
report     tables and JSON; plots: PNGs
steady     one side for a long time: is it flat?
machine, gguf, openvino: the bandwidth, the bytes a step reads, the rival's environment
"""
